"""The `Router` gRPC service: its methods, and the authentication of their callers."""

from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import grpc.aio

from api.access import METHODS
from api.auth.client import Client
from api.auth.guard import ApiKeyGuard
from api.grpc.admin import AdminService, Method
from api.grpc.inference import InferenceService
from common import rpc
from protos import router_pb2_grpc

_HEADER = "authorization"


def add_router_service(
    server: grpc.aio.Server,
    inference: InferenceService,
    admin: AdminService,
    callers: rpc.RpcGuard,
    *,
    max_fields: int,
) -> tuple[str, ...]:
    """Register the service. For Args and Returns see `rpc.add_service`."""
    servicer = SimpleNamespace(
        **{name: partial(_called, method) for name, method in admin.methods.items()},
        Generate=inference.Generate,
        Embed=inference.Embed,
        Score=inference.Score,
        ScoreTokens=inference.ScoreTokens,
        Tokenize=inference.Tokenize,
        Detokenize=inference.Detokenize,
        GetModel=inference.GetModel,
    )
    add = router_pb2_grpc.add_RouterServicer_to_server
    return rpc.add_service(server, add, servicer, callers, max_fields=max_fields)


async def _called(method: Method, request: Any, context: Any) -> Any:
    return await method(request)


class CallerResolver:
    """The guard of the methods, and of reflection. A method's caller is a Client."""

    def __init__(self, guard: ApiKeyGuard) -> None:
        self._guard = guard

    def of(self, method: str) -> rpc.Admit:
        """Return the guard of a method. Raise KeyError if the method has no access rule."""
        ask = self._guard.asking(METHODS[method])

        async def admit(context: Any) -> Client:
            return ask(authorization(context.invocation_metadata()), address(context.peer()))

        return admit


def authorization(metadata: Iterable[tuple[str, Any]] | None) -> str:
    """Return the authorization metadata of a call, like HTTP's header. "" if absent."""
    for name, value in metadata or ():
        if name == _HEADER and isinstance(value, str):
            return value
    return ""


def address(peer: str) -> str:
    """Return the address within gRPC's peer: ipv4:HOST:PORT, ipv6:[HOST]:PORT, percent-encoded."""
    kind, _, where = unquote(peer).partition(":")
    if kind in ("ipv4", "ipv6"):
        return where.rpartition(":")[0].strip("[]")
    return kind
