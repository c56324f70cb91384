"""Authentication of gRPC callers, for all methods including reflection. Only health is public."""

from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

from api.access import METHODS
from api.auth.client import Client
from api.auth.guard import ApiKeyGuard
from common import rpc

_HEADER = "authorization"


class CallerResolver:
    """The guard of a gRPC service. A method's caller is a Client."""

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
