"""Whether a call may be made, asked once for each before a byte of what it says is parsed.

Knows methods by their full names; how a caller is known (by_token.py, certificates.py) and what a
method does are not its business.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from common.identity.caller import Caller
from common.identity.refusals import Count, Refused
from common.identity.roles import MAY_CALL
from common.logs.throttle import Throttle, ThrottledLog

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Identified:
    """A caller, and the initial metadata that it is answered with."""

    caller: Caller
    answer: tuple[tuple[str, str], ...] = ()


# Of a full method name and the call's context; raises Refused.
Identify: TypeAlias = Callable[[str, Any], Identified]


class Guard:
    """Of one server. Event loop only."""

    def __init__(self, identify: Identify, count: Count) -> None:
        self._identify = identify
        self._count = count
        self._log = ThrottledLog(log, Throttle())

    def of(self, method: str) -> Callable[[Any], Awaitable[Caller]]:
        """What asks each caller of a method, given the call's context.

        It raises Unauthenticated or Forbidden, whose sentence is in the log of this side too.
        Raises:
            KeyError: nobody has said who may call the method.
        """
        return partial(self._admit, method, MAY_CALL[method])

    async def _admit(self, method: str, allowed: frozenset[str], context: Any) -> Caller:
        try:
            identified = self._identify(method, context)
            if not identified.caller.roles & allowed:
                raise Refused("role", _not_allowed(method, identified.caller, allowed))
        except Refused as refused:
            self._count("caller", refused.reason)
            self._log.warning(
                "a call was refused", method=method, peer=context.peer(), because=refused
            )
            raise refused.error from refused
        if identified.answer:
            await context.send_initial_metadata(identified.answer)
        return identified.caller


def _not_allowed(method: str, caller: Caller, allowed: frozenset[str]) -> str:
    return f"{_listed(caller.roles)} may not call {method}, only {_listed(allowed)} may"


def _listed(roles: frozenset[str]) -> str:
    return " or ".join(sorted(roles))
