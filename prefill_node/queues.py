"""The record of a hand-off on the prefill node, and the queues that it passes through."""

from dataclasses import dataclass

from engine.batch.holding import PageHolding
from node.queues.keyed_queue import KeyedQueue, RequestQueues
from node.queues.preparations import PreparationStages
from node.queues.scheduler_queue import SchedulerQueue
from node.request_state import RequestState, Stage
from node.timings import ProducerTimings


@dataclass(slots=True, eq=False, kw_only=True)
class PrefillState(RequestState):
    """A hand-off whose consumer wants its KV. Its key is the serial of the hand-off.

    Attributes:
        prefix_tokens: tokens that the consumer has.
        published: token ranges up to here are published.
        holding: pages of the whole prompt, from admission to the scheduler on.
    """

    timings: ProducerTimings
    prefix_tokens: int = 0
    published: int = 0
    holding: PageHolding | None = None


class BootstrapQueue(KeyedQueue[PrefillState]):
    """Hand-offs that wait for their Grant."""

    stage = Stage.BOOTSTRAP


class InflightQueue(KeyedQueue[PrefillState]):
    """Computed hand-offs, whose pages the consumer reads."""

    stage = Stage.INFLIGHT

    @property
    def num_waiting(self) -> int:
        return 0


class PrefillQueues(RequestQueues):
    """The queues of a prefill node. Pooling prompts are in `scheduled` only."""

    def __init__(
        self,
        preparing: PreparationStages[PrefillState],
        scheduled: SchedulerQueue[RequestState],
    ) -> None:
        self.bootstrap = BootstrapQueue()
        self.preparing = preparing
        self.scheduled = scheduled
        self.inflight = InflightQueue()
        super().__init__(scheduled, preparing, self.bootstrap, self.inflight)
