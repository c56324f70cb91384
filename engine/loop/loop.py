"""The event loop of every node: poll, choose a forward, launch it, finish the previous one.

With overlap, the CPU works on step N while the device runs step N+1. The pipeline is exactly one
step deep. Only the role knows the kind of node.
"""

import threading
import time
from collections.abc import Generator, Iterator
from typing import Protocol, TypeAlias

from engine.batch.batch import BatchResult, BatchRunner, ForwardMode, LaunchedBatch, ScheduleBatch
from engine.loop.step_clock import StepClock

_PROMPTS = (ForwardMode.EXTEND, ForwardMode.MIXED)
# Yields the launch for which the loop waits. Returns the launch in flight.
_Turn: TypeAlias = Generator[LaunchedBatch | None, None, LaunchedBatch | None]


class EngineRole(Protocol):
    """The part that makes a node a prefill node or a decode node. Called by the engine thread
    only."""

    def poll(self) -> None:
        """Receive messages and advance queues. Never blocks."""
        ...

    def next_batch(self) -> ScheduleBatch | None:
        """Choose the next forward, which the loop then launches."""
        ...

    def finish(self, batch: ScheduleBatch, result: BatchResult) -> None:
        """Apply the result of a batch. Called once per batch, in launch order."""
        ...

    def idle(self) -> None:
        """Check invariants, then sleep until woken or until something is due. Called only if
        nothing can be launched and nothing is in flight."""
        ...


class EventLoop:
    """The loop of a node, which runs until `stop`.

    Args:
        overlap: False: finish each step before the next is chosen, for debugging and as a test
            oracle.
        overlap_prefills: False: finish a prefill before the next prefill is launched. Its first
            token is then sent earlier, but the device waits for the CPU in between.
    """

    def __init__(
        self,
        role: EngineRole,
        runner: BatchRunner,
        *,
        overlap: bool = True,
        overlap_prefills: bool = True,
        clock: StepClock | None = None,
    ) -> None:
        self._role = role
        self._runner = runner
        self._overlap = overlap
        self._overlap_prefills = overlap_prefills
        self._stopped = threading.Event()
        self.clock = clock or StepClock()

    def run(self) -> None:
        """Run steps until stopped, then finish the step in flight.

        Raises the error of any part, because a failed engine must not run another step.
        """
        for _ in self.turns():
            pass

    def turns(self) -> Iterator[LaunchedBatch | None]:
        """Run as `run` does, but yield before each wait: the step whose result is needed, or None
        after the role was idle. A caller that waits for the step itself keeps the loop from
        blocking."""
        in_flight: LaunchedBatch | None = None
        while not self._stopped.is_set():
            in_flight = yield from self._turn(in_flight)
        if in_flight is not None:
            yield from self._finish(in_flight)

    def stop(self) -> None:
        """Stop the loop. May be called from any thread. The caller must wake a sleeping role."""
        self._stopped.set()

    def step(self, in_flight: LaunchedBatch | None) -> LaunchedBatch | None:
        """Run one turn. Return the launch that is in flight afterwards."""
        turn = self._turn(in_flight)
        try:
            while True:
                next(turn)
        except StopIteration as ended:
            after: LaunchedBatch | None = ended.value
            return after

    def _turn(self, in_flight: LaunchedBatch | None) -> _Turn:
        self.clock.turned()
        self._role.poll()
        batch = self._role.next_batch()
        if batch is None:
            if in_flight is None:
                self._role.idle()
                yield None
                self.clock.rested()
            else:
                yield from self._finish(in_flight)
            return None
        if in_flight is not None and not self._may_overlap(in_flight.batch, batch):
            yield from self._finish(in_flight)
            in_flight = None
        self.clock.launching(batch)
        launched = self._runner.launch(batch)
        self.clock.launched(batch)
        if in_flight is not None:
            yield from self._finish(in_flight)
        launched.sample()
        if self._overlap:
            return launched
        yield from self._finish(launched)
        return None

    def _may_overlap(self, before: ScheduleBatch, batch: ScheduleBatch) -> bool:
        return self._overlap_prefills or not (before.mode in _PROMPTS and batch.mode in _PROMPTS)

    def _finish(self, launched: LaunchedBatch) -> Iterator[LaunchedBatch]:
        asked = time.monotonic()
        yield launched
        result = launched.result()
        self.clock.meter.waited_s += time.monotonic() - asked
        self.clock.finished()
        self._role.finish(launched.batch, result)
