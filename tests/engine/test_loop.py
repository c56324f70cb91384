import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from msgspec.structs import replace

from common.errors import EngineFault
from engine.batch.batch import BatchResult, ForwardMode, LayerGroup, ScheduleBatch
from engine.loop.loop import EventLoop
from engine.loop.step_clock import PATIENCE, Lateness, StepClock
from engine.loop.watchdog import Watchdog
from tests.support.engine_rig import Rig, ints
from tests.support.fake_clock import FakeClock


def _batch(step: int, mode: ForwardMode = ForwardMode.DECODE, num_tokens: int = 1) -> ScheduleBatch:
    return ScheduleBatch(step, mode, ints([0]), ints([0]), ints([num_tokens]), ints([1]) > 0)


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
    role = ScriptedRole([_batch(1), _batch(2)])
    loop = EventLoop(role, role)
    in_flight = None
    for _ in range(4):
        in_flight = loop.step(in_flight)
    assert [entry for entry in role.log if entry != "poll"] == [
        "launch 1",
        "sample 1",
        "launch 2",
        "wait 1",
        "finish 1",
        "sample 2",
        "wait 2",
        "finish 2",
        "idle",
    ]


def test_every_turn_starts_with_a_poll():
    role = ScriptedRole([_batch(1)])
    loop = EventLoop(role, role)
    loop.step(loop.step(None))
    assert role.log == ["poll", "launch 1", "sample 1", "poll", "wait 1", "finish 1"]


def test_a_stopped_loop_finishes_the_step_in_flight():
    role = ScriptedRole([_batch(1), _batch(2)])
    loop = EventLoop(role, role)
    role.on_idle.append(loop.stop)
    loop.run()
    assert role.log[-2:] == ["poll", "idle"]
    role = ScriptedRole([_batch(1)])
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


# The step clock


class TimedClock(StepClock):
    """A clock of steps whose time the test moves."""

    def __init__(self, **options: float) -> None:
        self.time = FakeClock()
        super().__init__(self.time, **options)

    def step(self, batch: ScheduleBatch, seconds: float) -> None:
        """Run one step of this duration."""
        self.launched(batch)
        self.time.now += seconds
        self.finished()

    def late_s(self, seconds: float = 0.0) -> float:
        """Return by how much the engine is late after these seconds without progress."""
        self.time.now += seconds
        return self.reading.late_s(self.time.now)

    def expected_s(self, batch: ScheduleBatch) -> float:
        """Launch a step. Return its expected duration."""
        self.launched(batch)
        return self.reading.expected_s


def test_the_clock_reports_the_running_step_and_its_start():
    clock = TimedClock()
    assert clock.reading.started_at is None
    clock.launched(_batch(1))
    assert (clock.reading.step, clock.reading.started_at) == (1, 1000.0)
    clock.time.now = 1001.0
    clock.launched(_batch(2))
    assert clock.reading.step == 1
    clock.time.now = 1003.0
    clock.finished()
    assert (clock.reading.step, clock.reading.started_at) == (2, 1003.0)
    clock.finished()
    assert (clock.reading.started_at, clock.reading.finished) == (None, 2)


def test_the_expected_duration_of_a_prompt_depends_on_its_tokens_and_of_a_decode_step_not():
    clock = TimedClock()
    clock.step(_batch(1, ForwardMode.EXTEND, 100), 2.0)
    clock.step(_batch(1), 0.1)
    assert clock.expected_s(_batch(2, ForwardMode.MIXED, 1000)) == pytest.approx(20.0)
    clock.finished()
    assert clock.expected_s(_batch(3)) == pytest.approx(0.1)


def test_the_expected_duration_follows_measurements():
    clock = TimedClock()
    for seconds in (0.5, 2.0):
        for _ in range(40):
            clock.step(_batch(1), seconds)
    assert clock.expected_s(_batch(1)) == pytest.approx(2.0, rel=0.01)


def test_steps_with_only_copies_do_not_change_the_expected_duration():
    clock = TimedClock()
    clock.step(_batch(1), 0.1)
    nobody = ints([])
    clock.step(ScheduleBatch(2, ForwardMode.DECODE, nobody, nobody, nobody, nobody > 0), 9.0)
    assert clock.expected_s(_batch(3)) == pytest.approx(0.1)


def test_between_steps_an_engine_is_late_after_its_last_progress():
    clock = TimedClock()
    for _ in range(3):
        assert clock.late_s(9.0) == 9.0
        clock.turned()
        assert clock.late_s() == 0.0


def test_a_long_step_may_take_five_times_as_long_as_its_tokens_before():
    clock = TimedClock()
    clock.step(_batch(1, ForwardMode.EXTEND, 100), 1.0)
    clock.launched(_batch(2, ForwardMode.EXTEND, 1000))
    assert clock.late_s(49.0) == 0.0
    clock.launched(_batch(3, ForwardMode.EXTEND, 100))  # after it, which is progress, too
    assert clock.late_s(49.0) == 0.0
    assert clock.late_s(2.0) == pytest.approx(1.0)


def test_the_time_limit_of_a_step_ends_with_the_step():
    clock = TimedClock()
    batch = _batch(1, ForwardMode.EXTEND, 100)
    clock.launching(batch)
    clock.step(batch, 50.0)
    assert clock.reading.allowed_s == 0.0


# Seen failing: late after five times the usual duration, and at once after the compilation.
def test_a_kernel_compiled_while_serving_may_take_as_long_as_a_first_step(caplog):
    """A stand-in has the hooks of triton.knobs.runtime, which Triton calls around a compilation."""
    runtime = SimpleNamespace(jit_cache_hook=None, jit_post_compile_hook=None)
    clock = TimedClock(first_step_s=60.0)
    clock.compiles.watch(runtime)
    clock.step(_batch(1), 1.0)
    clock.launching(_batch(2))
    clock.time.now += 4.0
    told = {"key": "", "repr": "", "fn": SimpleNamespace(name="rope"), "compile": {}}
    assert not runtime.jit_cache_hook(**told)  # True: Triton does not compile it
    assert clock.late_s(59.0) == 0.0
    assert clock.late_s(2.0) == pytest.approx(1.0)  # a compiler that hangs is detected
    runtime.jit_post_compile_hook(**told)
    assert clock.late_s() == 0.0
    assert clock.late_s(6.0) == pytest.approx(1.0)
    assert clock.compiles.gauges() == {
        "total_kernels_compiled": 1.0,
        "total_kernel_compile_seconds": 61.0,
    }
    (record,) = caplog.records
    assert "kernel=rope" in record.getMessage() and "61" in record.getMessage()


def test_the_hooks_have_tritons_names():
    """Triton calls them by these names."""
    assert {"jit_cache_hook", "jit_post_compile_hook"} <= {*dir(triton.knobs.runtime)}


def test_an_operation_on_the_engine_thread_may_take_as_long_as_a_first_step():
    """A change of role compiles and captures."""
    clock = TimedClock(first_step_s=60.0)
    with clock.operation():
        assert clock.late_s(59.0) == 0.0
        assert clock.late_s(2.0) == pytest.approx(1.0)
    assert clock.late_s() == 0.0
    assert clock.late_s(2.0) == 2.0


def test_an_engine_is_not_late_while_the_observer_was_stopped_too():
    """The whole process was stopped. Afterwards either thread may be the first to run."""
    clock = TimedClock()
    lateness = Lateness(clock, look_s=1.0, now=clock.time)
    assert lateness.look() == 0.0
    clock.time.now += 600.0
    assert lateness.look() == 2.0  # at most two checks of what it has observed
    for late_s in (3.0, 4.0, 5.0):  # it observes again, and the engine still makes no progress
        clock.time.now += 1.0
        assert lateness.look() == late_s
    clock.turned()
    assert lateness.look() == 0.0


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE])
@pytest.mark.parametrize("begin", ["launching", "launched"])
def test_the_first_step_of_its_kind_may_compile(mode: ForwardMode, begin: str):
    """On a GPU during its launch, on a CPU during the step."""
    clock = TimedClock(first_step_s=60.0)
    other = ForwardMode.DECODE if mode is ForwardMode.EXTEND else ForwardMode.EXTEND
    clock.step(_batch(1, other), 0.0)
    getattr(clock, begin)(_batch(2, mode))
    assert clock.late_s(59.0) == 0.0
    assert clock.late_s(2.0) == pytest.approx(1.0)


def test_the_loop_reports_every_turn_and_every_launch_before_it_starts():
    role = ScriptedRole([_batch(1)])
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

    role = ScriptedRole([None, _batch(1), _batch(2), None, _batch(3)])
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


def test_steps_are_counted_by_their_mode_with_their_size_and_time():
    clock = TimedClock()
    for batch, seconds in (
        (_batch(1, ForwardMode.EXTEND, 100), 0.3),
        (_batch(1, ForwardMode.EXTEND, 20), 0.3),
        (_batch(1), 0.02),
    ):
        clock.step(batch, seconds)
    counted = clock.meter.distributions()
    seconds = counted["step_seconds/extend"]
    assert seconds.total == pytest.approx(0.6)
    assert seconds.counts[seconds.bounds.index(0.32)] == 2 == sum(seconds.counts)
    assert counted["batch_tokens/extend"].total == 120
    assert counted["batch_requests/extend"].total == 2
    assert sum(counted["step_seconds/decode"].counts) == 1
    assert sum(counted["step_seconds/mixed"].counts) == 0


# The watchdog


class Watched:
    def __init__(self) -> None:
        self.clock = TimedClock()
        self.time = self.clock.time
        self.work = False
        self.reports: list[float] = []
        self.dog = Watchdog(
            self.clock,
            limit_s=10.0,
            has_work=lambda: self.work,
            on_stuck=self.reports.append,
            now=self.time,
        )

    def look_for(self, seconds: int, *, turning: bool = True) -> int:
        """Check once a second while the loop turns."""
        for _ in range(seconds):
            self.time.now += 1.0
            if turning:
                self.clock.turned()
            self.dog.look()
        return len(self.reports)


def test_a_standstill_with_waiting_work_is_reported_once():
    watched = Watched()
    watched.work = True
    assert [watched.look_for(s) for s in (1, 9, 3, 20)] == [0, 0, 1, 1]
    assert watched.reports == [11.0]


@pytest.mark.parametrize("turning", [False, True])
def test_a_step_that_never_ends_is_a_standstill_too(turning: bool):
    """Seen failing if only work that waits for a step counts: the loop may turn during the step."""
    watched = Watched()
    watched.clock.launched(_batch(1))
    assert [watched.look_for(s, turning=turning) for s in (1, 11)] == [0, 1]


def test_an_idle_engine_may_be_idle_as_long_as_its_loop_turns():
    watched = Watched()
    assert watched.look_for(100) == 0
    watched.work = True
    assert [watched.look_for(s) for s in (9, 9)] == [0, 1]
    watched.work = False
    assert [watched.look_for(s, turning=False) for s in (9, 9)] == [1, 2]


def test_every_finished_step_resets_the_time_and_a_new_standstill_is_reported_again():
    watched = Watched()
    watched.work = True
    watched.look_for(1)
    for _ in range(5):
        watched.clock.step(_batch(1), 0.0)
        assert watched.look_for(9) == 0
    assert watched.look_for(11) == 1
    watched.clock.step(_batch(2), 0.0)
    assert [watched.look_for(s) for s in (1, 11)] == [1, 2]


def test_a_process_that_was_stopped_itself_reports_no_standstill():
    """Seen failing if the time between two checks counts in full."""
    watched = Watched()
    watched.work = True
    watched.look_for(1)
    watched.time.now += 3600.0
    assert watched.look_for(1) == 0
    watched.clock.step(_batch(1), 0.0)
    assert watched.look_for(9) == 0


def test_the_watchdog_runs_on_its_own_thread():
    stuck = threading.Event()
    dog = Watchdog(
        StepClock(), limit_s=0.01, has_work=lambda: True, on_stuck=lambda seconds: stuck.set()
    )
    dog.start()
    try:
        assert stuck.wait(30)
    finally:
        dog.stop()


def test_a_group_of_layers_counts_as_its_part_of_the_forward():
    clock = TimedClock()
    forward = replace(_batch(1, ForwardMode.SPLIT), starts=ints([0]), ends=ints([40]))
    for layers, seconds in ((LayerGroup(0, 2, 8), 0.5), (LayerGroup(2, 8, 8), 1.5)):
        clock.step(replace(forward, layers=layers), seconds)
    assert clock.prefill.token_s() == pytest.approx(2.0 / 40)
    whole = replace(forward, mode=ForwardMode.EXTEND)
    assert clock.allowed_s(whole) == pytest.approx(PATIENCE * 2.0)
    assert clock.allowed_s(replace(forward, layers=LayerGroup(0, 4, 8))) == pytest.approx(
        PATIENCE * 1.0
    )


def test_a_dropped_forward_says_nothing_about_the_time_of_prompts():
    clock = TimedClock()
    dropped = replace(
        _batch(1, ForwardMode.SPLIT), starts=ints([0]), ends=ints([0]), layers=LayerGroup(2, 2, 8)
    )
    clock.step(dropped, 3.0)
    assert clock.prefill.token_s() is None
    assert sum(clock.meter.distributions()["step_seconds/split"].counts) == 0


def test_short_prompts_hardly_change_the_time_of_a_token():
    clock = StepClock()
    clock.prefill.took(1000, 1.0)
    for _ in range(3):
        clock.prefill.took(10, 0.05)
    assert clock.prefill.token_s() == pytest.approx(0.001, rel=0.3)


def test_a_step_may_take_as_long_as_on_the_other_nodes_of_a_group():
    clock = TimedClock()
    clock.launched(replace(_batch(1, ForwardMode.IDLE), slots=ints([])))
    assert clock.late_s(3.0) == 3.0
    clock.others_allow_s = 2.0
    assert clock.late_s() == 1.0
    clock.finished()
    assert clock.late_s(1.0) == 1.0
