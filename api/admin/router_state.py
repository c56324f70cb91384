"""The state of a router, merged over all of its processes."""

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from api.requests.limiter import RequestLimiter
from protos.router_pb2 import RouterState
from router.workers.asking import SiblingProcesses

STATE = "/state"  # path between worker processes
_BY_WEIGHT = ("ready", "not ready", "draining")


class LocalState:
    """State of this process."""

    def __init__(
        self,
        admission: RequestLimiter,
        constant: RouterState,
        why_not_ready: Callable[[], str | None],
        in_use: Callable[[], Iterable[str]],
    ) -> None:
        """
        Args:
            constant: fields that never change.
            why_not_ready: returns a sentence, or None if a request could be placed now.
            in_use: returns addresses of nodes that requests are sent to.
        """
        self._admission = admission
        self._began = time.monotonic()
        self._constant = constant
        self._why_not_ready = why_not_ready
        self._in_use = in_use

    def now(self) -> RouterState:
        reason = self._why_not_ready()
        state = RouterState(
            state=_state(reason, self._admission.leaving),
            reason=reason or "",
            live_requests=self._admission.num_live,
            max_requests=self._admission.max_requests,
            oldest_process_s=time.monotonic() - self._began,
            in_use=self._in_use(),
        )
        state.MergeFrom(self._constant)
        return state

    @property
    def tells(self) -> Mapping[str, Callable[[Mapping[str, str]], Awaitable[bytes]]]:
        """Return the handler for queries of other worker processes."""

        async def tell(_: Mapping[str, str]) -> bytes:
            return self.now().SerializeToString()

        return {STATE: tell}


class MergedState:
    """State of all processes of this router."""

    def __init__(self, own: LocalState, siblings: SiblingProcesses, began: float) -> None:
        """
        Args:
            began: start time of the router, by time.monotonic().
        """
        self._own = own
        self._siblings = siblings
        self.began = began

    async def now(self) -> RouterState:
        told = await self._siblings.ask(STATE)
        own = self._own.now()
        whole = together([own, *map(RouterState.FromString, told.bodies.values())])
        whole.uptime_s = time.monotonic() - self.began
        whole.processes = told.num_asked + 1
        whole.silent_processes = told.num_silent
        return whole


def together(states: Sequence[RouterState]) -> RouterState:
    """Merge the states of the processes.

    The router is as ready as its least ready process, because any process may get a request. It
    uses the nodes that all processes use.
    """
    worst = max(states, key=lambda one: _BY_WEIGHT.index(one.state))
    alike = sum(one.state == worst.state for one in states)
    whole = RouterState()
    whole.CopyFrom(worst)
    if worst.reason and alike < len(states):
        whole.reason = f"{alike} of {len(states)} processes: {worst.reason}"
    whole.live_requests = sum(one.live_requests for one in states)
    whole.max_requests = sum(one.max_requests for one in states)
    whole.oldest_process_s = max(one.oldest_process_s for one in states)
    whole.in_use[:] = sorted(frozenset.intersection(*(frozenset(one.in_use) for one in states)))
    return whole


def _state(reason: str | None, leaving: bool) -> str:
    if leaving:
        return "draining"
    return "ready" if reason is None else "not ready"
