"""Wrappers of role and runner for a data-parallel group, whose nodes begin each step together.

The event loop is the same as in any node. The role returns an idle batch if only other nodes have
rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.batch.batch import BatchResult, BatchRunner, ForwardMode, LaunchedBatch, ScheduleBatch
from engine.loop.loop import EngineRole
from engine.loop.step_clock import StepClock
from engine.models.decoder import Decoder
from engine.ranks.expert_exchange import ExpertExchange
from engine.ranks.lockstep import Announcement, Lockstep, ShutdownStage
from engine.runner.forwards import Forwards
from engine.runner.stream import StreamEvent
from engine.scheduler.next_rows import PrefillCounts, prefills_now
from engine.scheduler.scheduler import Scheduler

_NO_ROWS = np.empty(0, np.int32)
IDLE = ScheduleBatch(0, ForwardMode.IDLE, _NO_ROWS, _NO_ROWS, _NO_ROWS, np.empty(0, np.bool_))
_DECODES = (ForwardMode.DECODE, ForwardMode.MIXED, ForwardMode.VERIFY)


class GroupedRole:
    """A role whose steps begin together with the steps of the other nodes. Engine thread only.

    Args:
        on_drain: called once when another node drains.
        delays: whether prompts wait for prompts of other nodes (prefill delayer).
    """

    def __init__(
        self,
        role: EngineRole,
        lockstep: Lockstep,
        scheduler: Scheduler,
        clock: StepClock,
        *,
        stage: Callable[[], ShutdownStage],
        on_drain: Callable[[], None],
        delays: bool = False,
    ) -> None:
        self._role = role
        self._lockstep = lockstep
        self._scheduler = scheduler
        self._clock = clock
        self._stage = stage
        self._on_drain: Callable[[], None] | None = on_drain
        self._prompts = DelayedPrompts(scheduler, lockstep) if delays else None
        self._allowed_s = 0.0  # limit of the newest step, in seconds

    def poll(self) -> None:
        self._role.poll()

    def next_batch(self) -> ScheduleBatch | None:
        batch = self._role.next_batch()
        launches = self._lockstep.meet(self._announcement(batch))
        announced = self._lockstep.announcements
        if self._on_drain is not None and any(
            each.stage > ShutdownStage.SERVING for each in announced
        ):
            self._on_drain()
            self._on_drain = None
        if self._prompts is not None:
            self._prompts.follow(announced)
        if not launches:
            return None
        # The previous step may be in flight, too.
        before_s = self._allowed_s
        self._allowed_s = max(each.allowed_ms for each in announced) / 1000
        self._clock.others_allow_s = max(before_s, self._allowed_s)
        if batch is None:
            self._lockstep.idle_batches += 1
            return IDLE
        return batch

    def finish(self, batch: ScheduleBatch, result: BatchResult) -> None:
        if batch is not IDLE:
            self._role.finish(batch, result)

    def idle(self) -> None:
        if self._prompts is None or not self._prompts.may_continue:
            self._role.idle()

    def _announcement(self, batch: ScheduleBatch | None) -> Announcement:
        scheduler = self._scheduler
        runs = not scheduler.paused
        own = Announcement(
            wants_prefill=runs and scheduler.num_waiting > 0,
            has_room=runs and scheduler.has_prefill_room,
            chunks=runs and scheduler.is_chunking,
            stage=self._stage(),
        )
        if batch is None:
            return own
        return own._replace(
            num_tokens=batch.num_tokens,
            launches=True,
            decodes=batch.mode in _DECODES,
            allowed_ms=int(self._clock.allowed_s(batch) * 1000),
        )


class DelayedPrompts:
    """The prefill delayer of one node. All nodes of the group come to the same decision.

    Attributes:
        waited: number of steps that prompts have waited so far for prompts of other nodes.
        may_continue: whether prompts that were delayed in the newest step may be computed now.
    """

    def __init__(self, scheduler: Scheduler, lockstep: Lockstep) -> None:
        self._scheduler = scheduler
        self._lockstep = lockstep
        self.waited = 0
        self.may_continue = False

    def follow(self, announced: Sequence[Announcement]) -> None:
        """Decide about the next step, based on the announcements in this one."""
        rows = self._scheduler.rows
        was_open = rows.admits_prompts
        if not was_open and self._scheduler.num_waiting:
            self._lockstep.delayed_prefills += 1
        with_room = [each for each in announced if each.has_room]
        counts = PrefillCounts(
            len(with_room),
            sum(each.wants_prefill for each in with_room),
            sum(each.decodes for each in announced),
            sum(each.chunks for each in announced),
        )
        rows.admits_prompts = prefills_now(counts, self.waited)
        self.waited = self.waited + 1 if counts.ready and not rows.admits_prompts else 0
        self.may_continue = rows.admits_prompts and not was_open


class GroupedRunner:
    """A runner whose forwards compute experts for all nodes of a group. Engine thread only.

    Args:
        forwards: the forward stream of the runner. All exchanges run on it.
    """

    def __init__(
        self,
        runner: BatchRunner,
        forwards: Forwards,
        model: Decoder,
        exchange: ExpertExchange,
        lockstep: Lockstep,
    ) -> None:
        self._runner = runner
        self._forwards = forwards
        self._model = model
        self._exchange = exchange
        self._lockstep = lockstep

    def launch(self, batch: ScheduleBatch) -> LaunchedBatch:
        num_tokens = [each.num_tokens for each in self._lockstep.announcements]

        def begin() -> None:
            self._exchange.begin(num_tokens)
            if not num_tokens[self._lockstep.rank] and any(num_tokens):
                self._model.take_part()

        return _GroupStep(self._forwards.enqueue(begin), self._runner.launch(batch))


@dataclass(frozen=True, slots=True, eq=False)
class _GroupStep:
    begun: StreamEvent
    launched: LaunchedBatch

    @property
    def batch(self) -> ScheduleBatch:
        return self.launched.batch

    def sample(self) -> None:
        self.launched.sample()

    def result(self) -> BatchResult:
        self.begun.wait()
        return self.launched.result()
