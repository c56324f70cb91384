"""Who calls a method of the router over gRPC: the guard of its services, reflection's too; only
health is anybody's."""

from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

from common import rpc
from router.clients.client import Client
from router.clients.guard import Guard

_HEADER = "authorization"
_FOR_OPERATORS = frozenset({"/baton.v1.Router/GetCluster", "/baton.v1.Router/Explain"})
_COMMANDS = frozenset(
    f"/baton.v1.Router/{name}"
    for name in (
        *("Drain", "Move", "TellPlan", "LoadAdapter", "UnloadAdapter"),
        *("Pause", "Continue", "UpdateWeights", "FlushCache"),
        *("ReleaseMemory", "ResumeMemory", "StartProfile", "StopProfile"),
    )
)


class Callers:
    """A method's caller is a Client."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def of(self, method: str) -> rpc.Admit:
        if method in _COMMANDS:
            ask = self._guard.commander
        else:
            ask = self._guard.operator if method in _FOR_OPERATORS else self._guard.client

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
