"""The interface of a role to operators' commands (`ControlledRole`), and pauses of generation
(`Pauses`).

An operator starts and ends a pause. The response is sent when the pause is reached.

    runs --begin--> pausing --nothing launched, the mode's work done--> paused --resume--> runs

The role handles the requests in progress, and queues new ones with their deadlines. The engine loop
continues to turn, so heartbeats are sent.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from common.distribution import HistogramCounts
from common.pausing import PAUSE_MODES, PauseMode
from common.queueing import PriorityClass, QueueBacklog
from common.requests.namespace import WeightsId
from common.requests.timeline import RequestTraces
from engine.scheduler.scheduler import Scheduler
from node.messages import NodeCallResult


class ControlledRole(Protocol):
    """The state and commands of a role. Engine thread only."""

    @property
    def scheduler(self) -> Scheduler: ...

    # Reports.

    @property
    def busy(self) -> bool:
        """Return whether there are requests."""
        ...

    def queues(self) -> dict[str, int]: ...

    def waiting_by_class(self) -> Mapping[PriorityClass, int]: ...

    def counters(self) -> dict[str, int]: ...

    def distributions(self) -> Mapping[str, HistogramCounts]: ...

    def backlogs(self) -> dict[str, QueueBacklog]: ...

    def explain(self, request_id: str) -> RequestTraces: ...

    # Operators' commands.

    def abort(self, request_id: str) -> int:
        """Abort the requests with that id. Returns their number."""
        ...

    def abort_all(self) -> int:
        """Abort all requests. Returns their number."""
        ...

    def release_kv(self) -> bool:
        """Release the KV of all requests. Called at rest until it returns True: then only the
        prefix cache has KV.
        """
        ...

    def update_waiting_requests(self) -> None:
        """Compute all waiting requests with the new weights from now on."""
        ...

    def set_weight_version(self, weights: WeightsId) -> None:
        """End this node's pairs. From now on it pairs with nodes of this weight version."""
        ...


PAUSED = "aborted: generation was paused"  # error of requests that a pause aborts


@dataclass(frozen=True, slots=True)
class _Awaited:
    number: int  # number of the call
    fresh: bool
    num_aborted: int
    keeps: bool  # whether requests keep their KV


class Pauses:
    """The pauses of operators. Engine thread only."""

    def __init__(self) -> None:
        self._awaited: list[_Awaited] = []
        self._counts = dict.fromkeys(PAUSE_MODES, 0)

    @property
    def busy(self) -> bool:
        return bool(self._awaited)

    def counters(self) -> dict[str, int]:
        return {f"pauses/{mode}": number for mode, number in self._counts.items()}

    def begin(self, number: int, mode: PauseMode, role: ControlledRole) -> None:
        """Start a pause. `reached` yields the response. A paused node may change the mode."""
        fresh = not role.scheduler.paused
        self._counts[mode.value] += 1
        role.scheduler.paused = True
        num_aborted = role.abort_all() if mode is PauseMode.ABORT else 0
        keeps = mode is PauseMode.IN_PLACE
        self._awaited.append(_Awaited(number, fresh, num_aborted, keeps))

    def resume(self, number: int, role: ControlledRole) -> Iterator[NodeCallResult]:
        """End the pause. Yields the response, and errors for pauses that were not reached."""
        was_paused, role.scheduler.paused = role.scheduler.paused, False
        yield NodeCallResult(number, integer=int(was_paused))
        for each in self._awaited:
            yield NodeCallResult(each.number, error="it was resumed before it was paused")
        self._awaited.clear()

    def reached(self, role: ControlledRole) -> Iterator[NodeCallResult]:
        """Yield the responses of pauses that are reached."""
        if not self._awaited or not role.scheduler.at_rest:
            return
        empty = all(each.keeps for each in self._awaited) or role.release_kv()
        for each in [each for each in self._awaited if each.keeps or empty]:
            self._awaited.remove(each)
            yield NodeCallResult(each.number, integer=each.num_aborted, fresh=each.fresh)
