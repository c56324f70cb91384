"""Authorization of calls, checked once per call before its first message is parsed.

MAY_CALL lists the roles that may call each method of a node, by full method name. Unlisted methods
cannot be called. Clients of the router have API keys instead of roles. Authentication is in
tokens.py and program.py. Failures have one of a closed list of reasons and are counted.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

from common.errors import Forbidden, ServingError, Unauthenticated
from common.logs import ThrottledLog

log = logging.getLogger(__name__)

Role = Literal["router", "node", "operator"]
ROLES: tuple[Role, ...] = get_args(Role)
CALLEE: Role = "node"  # role of the callee for all these methods
_OPERATOR: frozenset[Role] = frozenset({"operator"})
_ROUTER_TOO: frozenset[Role] = frozenset({"router", "operator"})
MAY_CALL: Mapping[str, frozenset[Role]] = {
    "/baton.v1.DecodeNode/Serve": frozenset({"router"}),
    "/baton.v1.KvTransfer/Pair": frozenset({"node"}),
    "/baton.v1.Ranks/Follow": frozenset({"node"}),
    "/baton.v1.Pooling/Pool": frozenset({"router"}),
    "/baton.v1.Node/Describe": _ROUTER_TOO,
    "/baton.v1.Node/WatchCache": _ROUTER_TOO,
    "/baton.v1.Node/Explain": _ROUTER_TOO,
    "/baton.v1.Node/LoadAdapter": _ROUTER_TOO,
    "/baton.v1.Node/UnloadAdapter": _ROUTER_TOO,
    "/baton.v1.Node/Drain": _OPERATOR,
    "/baton.v1.Node/Switch": _OPERATOR,
    "/baton.v1.Node/Pause": _ROUTER_TOO,
    "/baton.v1.Node/Continue": _ROUTER_TOO,
    "/baton.v1.Node/ReleaseMemory": _ROUTER_TOO,
    "/baton.v1.Node/ResumeMemory": _ROUTER_TOO,
    "/baton.v1.Node/StartProfile": _ROUTER_TOO,
    "/baton.v1.Node/StopProfile": _ROUTER_TOO,
    "/baton.v1.Node/FlushCache": _ROUTER_TOO,
    "/baton.v1.Node/PrepareWeights": _ROUTER_TOO,
    "/baton.v1.Node/PutWeights": _ROUTER_TOO,
    "/baton.v1.Node/TakeWeights": _ROUTER_TOO,
    "/baton.v1.Node/Abort": _OPERATOR,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": _OPERATOR,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _OPERATOR,
}
Reason = Literal[
    "missing",  # no credentials
    "malformed",
    "secret",  # signed with another secret
    "clock",  # expired or not valid yet
    "call",  # made for another call
    "replayed",
    "role",  # authenticated, but not allowed
]
REASONS: tuple[Reason, ...] = get_args(Reason)
# The side that failed authentication: the caller of this process, or the callee of its call.
Side = Literal["caller", "callee"]
SIDES: tuple[Side, ...] = get_args(Side)
Count: TypeAlias = Callable[[Side, Reason], None]


class AuthRejection(Exception):
    """Failed authentication. The message is for both sides and contains no secrets."""

    def __init__(self, reason: Reason, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason

    @property
    def error(self) -> ServingError:
        """The error to send to the caller."""
        kind = Forbidden if self.reason == "role" else Unauthenticated
        return kind(str(self))


def uncounted(_side: Side, _reason: Reason) -> None:
    """Do not count a failed authentication, in processes without metrics."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The authenticated caller of a method.

    Attributes:
        name: `node_name` of a node's instance id. None: no verified name.
    """

    roles: frozenset[Role] = frozenset()
    name: str | None = None


UNAUTHENTICATED = Caller()  # used when callers are not authenticated


def node_name(instance: int) -> str:
    """Return the name of a node in its tokens."""
    return f"{instance:016x}"


@dataclass(frozen=True, slots=True)
class AuthenticatedCaller:
    """A caller, and the initial metadata to send in response."""

    caller: Caller
    answer: tuple[tuple[str, str], ...] = ()


# Called with a full method name and the call's context. Raises AuthRejection.
Identify: TypeAlias = Callable[[str, Any], AuthenticatedCaller]


class CallAuthenticator:
    """Authorization for one server. Event loop only."""

    def __init__(self, identify: Identify, count: Count) -> None:
        self._identify = identify
        self._count = count
        self._log = ThrottledLog(log)

    def of(self, method: str) -> Callable[[Any], Awaitable[Caller]]:
        """Return the check for callers of a method. It is called with the call's context.

        The check raises Unauthenticated or Forbidden, and logs the error on this side too.

        Raises:
            KeyError: the method has no rule.
        """
        return partial(self._admit, method, MAY_CALL[method])

    async def _admit(self, method: str, allowed: frozenset[str], context: Any) -> Caller:
        try:
            identified = self._identify(method, context)
            if not identified.caller.roles & allowed:
                raise AuthRejection("role", _not_allowed(method, identified.caller, allowed))
        except AuthRejection as refused:
            self._count("caller", refused.reason)
            self._log.warning("call rejected", method=method, peer=context.peer(), reason=refused)
            raise refused.error from refused
        if identified.answer:
            await context.send_initial_metadata(identified.answer)
        return identified.caller


def _not_allowed(method: str, caller: Caller, allowed: frozenset[str]) -> str:
    return f"{_listed(caller.roles)} may not call {method}, only {_listed(allowed)} may"


def _listed(roles: frozenset[str]) -> str:
    return " or ".join(sorted(roles))
