"""The guard before every method of a gRPC server, reflection's too; only health is anybody's.

A call that may not be made ends before a byte of what it says is parsed.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NoReturn, TypeAlias
from urllib.parse import unquote

import grpc
import grpc.aio
from grpc_health.v1 import health

from common.errors import Forbidden, ServingError, Unauthenticated
from router.clients.guard import Guard

_OPEN = f"/{health.SERVICE_NAME}/"
_HEADER = "authorization"

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"


class RpcGuard(grpc.aio.ServerInterceptor):
    """For one server."""

    def __init__(self, guard: Guard, *, for_operators: frozenset[str]) -> None:
        """
        Args:
            for_operators: full names of methods that only they may call.
        """
        self._guard = guard
        self._for_operators = for_operators

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        details: grpc.HandlerCallDetails,
    ) -> Handler:
        if details.method.startswith(_OPEN):
            return await continuation(details)
        ask = self._guard.operator if details.method in self._for_operators else self._guard.client
        try:
            # Nobody is told apart by an address here: that is for whoever does the work.
            ask(authorization(details.invocation_metadata), "")
        except (Unauthenticated, Forbidden) as error:
            return _refusal(error)
        return await continuation(details)


def authorization(metadata: Iterable[tuple[str, Any]] | None) -> str:
    """What a call has sent in place of HTTP's header; "" for nothing."""
    for name, value in metadata or ():
        if name == _HEADER and isinstance(value, str):
            return value
    return ""


def address(peer: str) -> str:
    """Of what gRPC tells of the other side: ipv4:HOST:PORT, ipv6:[HOST]:PORT, percent-encoded."""
    kind, _, where = unquote(peer).partition(":")
    if kind in ("ipv4", "ipv6"):
        return where.rpartition(":")[0].strip("[]")
    return kind


def _refusal(error: ServingError) -> Handler:
    async def refuse(_: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> NoReturn:
        await context.abort(error.status, str(error))

    # The only kind that waits for no message.
    return grpc.stream_stream_rpc_method_handler(refuse)
