"""Who calls a method of the router over gRPC: the guard of its services, reflection's too; only
health is anybody's."""

from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

from api.access import METHODS
from api.auth.client import Client
from api.auth.guard import Guard
from common import rpc

_HEADER = "authorization"


class Callers:
    """A method's caller is a Client."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def of(self, method: str) -> rpc.Admit:
        """Raises KeyError: nothing says who may call the method."""
        ask = self._guard.asking(METHODS[method])

        async def admit(context: Any) -> Client:
            return ask(authorization(context.invocation_metadata()), address(context.peer()))

        return admit


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
