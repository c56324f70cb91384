"""Authorization of calls, checked once per call before its first message is parsed.

Methods are known by their full names only. Authentication is in by_token.py and program.py.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from common.identity.caller import Caller
from common.identity.refusals import AuthRejection, Count
from common.identity.roles import MAY_CALL
from common.logs.throttle import Throttle, ThrottledLog

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AuthenticatedCaller:
    """A caller, and the initial metadata of the response to it."""

    caller: Caller
    answer: tuple[tuple[str, str], ...] = ()


# Called with a full method name and the call's context. Raises AuthRejection.
Identify: TypeAlias = Callable[[str, Any], AuthenticatedCaller]


class CallAuthenticator:
    """Authorization for one server. Event loop only."""

    def __init__(self, identify: Identify, count: Count) -> None:
        self._identify = identify
        self._count = count
        self._log = ThrottledLog(log, Throttle())

    def of(self, method: str) -> Callable[[Any], Awaitable[Caller]]:
        """Return the check for callers of a method. It is called with the call's context.

        The check raises Unauthenticated or Forbidden and logs the error on this side too.

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
