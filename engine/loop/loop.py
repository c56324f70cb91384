"""The event loop of every node: poll, choose a forward, launch it, finish the one before.

With overlap the CPU works on step N while the device runs step N+1; the pipeline is exactly one
step deep. What kind of node this is, only the role knows.
"""

import threading
import time
from typing import Protocol

from engine.batch.batch import BatchResult, ForwardMode, Launched, Runner, ScheduleBatch
from engine.loop.clock import StepClock

_PROMPTS = (ForwardMode.EXTEND, ForwardMode.MIXED)


class Role(Protocol):
    """What makes a node a prefill or a decode node. All calls come from the engine thread."""

    def poll(self) -> None:
        """Takes messages and moves queues; never blocks."""
        ...

    def next_batch(self) -> ScheduleBatch | None:
        """Chooses the next forward, which will be launched."""
        ...

    def finish(self, batch: ScheduleBatch, result: BatchResult) -> None:
        """Once per batch, in the order of launches."""
        ...

    def idle(self) -> None:
        """Nothing to launch and nothing in flight: checks invariants, sleeps until woken or due."""
        ...


class EventLoop:
    """Turns until `stop`.

    Args:
        overlap: False finishes each step before the next is chosen: for debugging, and as oracle.
        overlap_prefills: False finishes the first of two prefills in a row before the second is
            launched; its first token leaves earlier, and the device waits for the CPU meanwhile.
    """

    def __init__(
        self,
        role: Role,
        runner: Runner,
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
        """Steps until stopped, then finishes what is in flight. Raises whatever a part raises: an
        engine that failed is not to be trusted with another step."""
        in_flight: Launched | None = None
        while not self._stopped.is_set():
            in_flight = self.step(in_flight)
        if in_flight is not None:
            self._finish(in_flight)

    def stop(self) -> None:
        """From any thread. Whoever calls it wakes the role, should it sleep."""
        self._stopped.set()

    def step(self, in_flight: Launched | None) -> Launched | None:
        """One turn. Takes the launch that is in flight and returns the one that is then."""
        self.clock.turned()
        self._role.poll()
        batch = self._role.next_batch()
        if batch is None:
            if in_flight is None:
                self._role.idle()
            else:
                self._finish(in_flight)
            return None
        if in_flight is not None and not self._may_overlap(in_flight.batch, batch):
            self._finish(in_flight)
            in_flight = None
        self.clock.launching(batch)
        launched = self._runner.launch(batch)
        self.clock.launched(batch)
        if in_flight is not None:
            self._finish(in_flight)
        launched.sample()
        if self._overlap:
            return launched
        self._finish(launched)
        return None

    def _may_overlap(self, before: ScheduleBatch, batch: ScheduleBatch) -> bool:
        return self._overlap_prefills or not (before.mode in _PROMPTS and batch.mode in _PROMPTS)

    def _finish(self, launched: Launched) -> None:
        asked = time.monotonic()
        result = launched.result()
        self.clock.meter.waited_s += time.monotonic() - asked
        self.clock.finished()
        self._role.finish(launched.batch, result)
