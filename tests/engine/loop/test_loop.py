"""The event loop: the order of launches and waits, and its reports to the clock of steps."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from common.errors import EngineFault
from engine.batch.batch import BatchResult, ScheduleBatch
from engine.loop.loop import EventLoop
from tests.engine.loop.test_step_clock import TimedClock, one_row
from tests.support.engine.engine_rig import Rig, ints


@dataclass
class ScriptedRole:
    """Returns batches by number. Logs all calls, including those of the runner."""

    batches: list[ScheduleBatch | None]
    log: list[str] = field(default_factory=list)
    on_idle: list = field(default_factory=list)

    def poll(self) -> None:
        self.log.append("poll")

    def next_batch(self) -> ScheduleBatch | None:
        return self.batches.pop(0) if self.batches else None

    def finish(self, batch: ScheduleBatch, result: BatchResult) -> None:
        self.log.append(f"finish {batch.step}")

    def idle(self) -> None:
        self.log.append("idle")
        for call in self.on_idle:
            call()

    def launch(self, batch: ScheduleBatch) -> "ScriptedLaunch":
        self.log.append(f"launch {batch.step}")
        return ScriptedLaunch(batch, self.log)


@dataclass
class ScriptedLaunch:
    batch: ScheduleBatch
    log: list[str]

    def sample(self) -> None:
        self.log.append(f"sample {self.batch.step}")

    def result(self) -> BatchResult:
        self.log.append(f"wait {self.batch.step}")
        return BatchResult(ints([0]))


def test_with_overlap_the_next_step_is_launched_before_the_last_result_is_awaited():
    """Sample rows that need the last step's tokens after that step has finished.

    Seen failing with `sample` before `_finish`.
    """
    role = ScriptedRole([one_row(1), one_row(2)])
    loop = EventLoop(role, role)
    in_flight = None
    for _ in range(4):
        in_flight = loop.step(in_flight)
    assert role.log == [
        *("poll", "launch 1", "sample 1"),
        *("poll", "launch 2", "wait 1", "finish 1", "sample 2"),
        *("poll", "wait 2", "finish 2"),
        *("poll", "idle"),
    ]


def test_a_stopped_loop_finishes_the_step_in_flight():
    role = ScriptedRole([one_row(1), one_row(2)])
    loop = EventLoop(role, role)
    role.on_idle.append(loop.stop)
    loop.run()
    assert role.log[-2:] == ["poll", "idle"]
    role = ScriptedRole([one_row(1)])
    loop = EventLoop(role, role)
    role.launch, launch = lambda batch: (loop.stop(), launch(batch))[1], role.launch
    loop.run()
    assert role.log == ["poll", "launch 1", "sample 1", "wait 1", "finish 1"]


def test_a_loop_is_stopped_from_another_thread():
    role = ScriptedRole([])
    loop = EventLoop(role, role)
    idle = threading.Event()
    role.on_idle.append(idle.set)
    thread = threading.Thread(target=loop.run)
    thread.start()
    assert idle.wait(30)
    loop.stop()
    thread.join(30)
    assert not thread.is_alive()


def test_an_error_of_any_part_ends_the_loop():
    role = ScriptedRole([])

    def fail() -> None:
        raise EngineFault("pages: one is lost")

    role.on_idle.append(fail)
    with pytest.raises(EngineFault, match="lost"):
        EventLoop(role, role).run()


def test_an_idle_engine_detects_a_leak():
    rig = Rig(vandal=False)
    rig.add([1], max_tokens=2)
    rig.run()
    rig.pages.allocate(1, 0)
    with pytest.raises(EngineFault):
        rig.loop.step(None)


def test_the_loop_reports_every_turn_and_every_launch_before_it_starts():
    role = ScriptedRole([one_row(1)])
    loop = EventLoop(role, role)
    seen = []
    role.launch, launch = lambda b: (seen.append(loop.clock.reading), launch(b))[1], role.launch
    loop.step(loop.step(None))
    (launching,) = seen
    assert (launching.turns, loop.clock.reading.turns) == (1, 2)
    assert launching.allowed_s > loop.clock.reading.allowed_s


def test_a_gap_is_the_time_before_a_launch_in_which_the_device_had_no_step():
    """Neither the sleep of an idle engine, nor time during which another step runs."""

    def takes(seconds: float, call: Callable[..., Any]) -> Callable[..., Any]:
        def late(*arguments: Any) -> Any:
            time.now += seconds
            return call(*arguments)

        return late

    role = ScriptedRole([None, one_row(1), one_row(2), None, one_row(3)])
    clock = TimedClock()
    time = clock.time
    role.idle = takes(1000.0, role.idle)  # type: ignore[method-assign]
    role.next_batch = takes(1.0, role.next_batch)  # type: ignore[method-assign]
    role.launch = takes(10.0, role.launch)  # type: ignore[method-assign]
    loop = EventLoop(role, role, clock=clock)
    in_flight, gaps = None, []
    for _ in range(5):
        in_flight = loop.step(in_flight)
        gaps.append(clock.meter.gap_s)
    # The gap of step 3 follows the turn in which step 2 ends.
    assert gaps == [0.0, 11.0, 11.0, 11.0, 22.0]
