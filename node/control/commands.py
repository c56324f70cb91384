"""The form of operators' commands, the interface of a role to them, and pauses of generation.

A command is a generator. EngineControl starts it when it arrives, and then continues it after all
messages of each turn of the engine loop, until it ends. The engine loop continues to turn
meanwhile, so heartbeats are sent.

An operator starts and ends a pause. The response is sent when the pause is reached.

    runs --pause--> pausing --nothing launched, the mode's work done--> paused --resume--> runs

The role handles the requests in progress, and queues new ones with their deadlines.
"""

from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Future
from typing import Protocol, TypeAlias, TypeVar

from common.distribution import HistogramCounts
from common.errors import FailedPrecondition
from common.pausing import PAUSE_MODES, PauseMode
from common.queueing import PriorityClass, QueueBacklog
from common.requests.namespace import WeightsId
from common.requests.timeline import RequestTraces
from engine.scheduler.scheduler import Scheduler
from node.messages import NodeCallResult

# Yields None to wait for the next turn, and the response once. Raises ServingError instead.
CommandSteps: TypeAlias = Iterator[NodeCallResult | None]

T = TypeVar("T")


def awaited(future: Future[T]) -> Generator[None, None, T]:
    """Wait turn by turn for a future. Returns its result or raises its error."""
    while not future.done():
        yield None
    return future.result()


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


class Pauses:
    """The pauses of operators. Engine thread only.

    Args:
        gauges: report of the node, which gets the number of pauses by mode.
    """

    def __init__(self, gauges: dict[str, float]) -> None:
        self._gauges = gauges
        self._gauges |= {f"total_pauses/{mode}": 0.0 for mode in PAUSE_MODES}
        self._num_resumed = 0

    def pause(self, mode: PauseMode, role: ControlledRole) -> CommandSteps:
        """Pause generation. A paused node may change the mode."""
        fresh, num_resumed = not role.scheduler.paused, self._num_resumed
        self._gauges[f"total_pauses/{mode.value}"] += 1
        role.scheduler.paused = True
        num_aborted = role.abort_all() if mode is PauseMode.ABORT else 0
        keeps_kv = mode is PauseMode.IN_PLACE
        reached = False
        while not reached:
            yield None
            if self._num_resumed > num_resumed:
                raise FailedPrecondition("it was resumed before it was paused")
            reached = role.scheduler.at_rest and (keeps_kv or role.release_kv())
        yield NodeCallResult(integer=num_aborted, fresh=fresh)

    def resume(self, role: ControlledRole) -> CommandSteps:
        """End the pause."""
        was_paused, role.scheduler.paused = role.scheduler.paused, False
        self._num_resumed += 1
        yield NodeCallResult(integer=int(was_paused))
