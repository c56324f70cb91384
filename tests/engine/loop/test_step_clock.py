"""The clock of steps: the running step, the delay of an engine, and the metrics of steps."""

import random
from types import SimpleNamespace

import pytest
import triton
from msgspec.structs import replace

from common import distribution
from common.distribution import LiveHistogram
from engine.batch.batch import ForwardMode, LayerGroup, ScheduleBatch
from engine.loop.step_clock import PATIENCE, Lateness, StepClock, StepMeter
from tests.support.engine.engine_rig import ints
from tests.support.fake_clock import FakeClock


def one_row(
    step: int, mode: ForwardMode = ForwardMode.DECODE, num_tokens: int = 1
) -> ScheduleBatch:
    return ScheduleBatch(step, mode, ints([0]), ints([0]), ints([num_tokens]), ints([1]) > 0)


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
    clock.launched(one_row(1))
    assert (clock.reading.step, clock.reading.started_at) == (1, 1000.0)
    clock.time.now = 1001.0
    clock.launched(one_row(2))
    assert clock.reading.step == 1
    clock.time.now = 1003.0
    clock.finished()
    assert (clock.reading.step, clock.reading.started_at) == (2, 1003.0)
    clock.finished()
    assert (clock.reading.started_at, clock.reading.finished) == (None, 2)


def test_the_expected_duration_of_a_prompt_depends_on_its_tokens_and_of_a_decode_step_not():
    clock = TimedClock()
    clock.step(one_row(1, ForwardMode.EXTEND, 100), 2.0)
    clock.step(one_row(1), 0.1)
    assert clock.expected_s(one_row(2, ForwardMode.MIXED, 1000)) == pytest.approx(20.0)
    clock.finished()
    assert clock.expected_s(one_row(3)) == pytest.approx(0.1)


def test_the_expected_duration_follows_measurements():
    clock = TimedClock()
    for seconds in (0.5, 2.0):
        for _ in range(40):
            clock.step(one_row(1), seconds)
    assert clock.expected_s(one_row(1)) == pytest.approx(2.0, rel=0.01)


def test_steps_with_only_copies_do_not_change_the_expected_duration():
    clock = TimedClock()
    clock.step(one_row(1), 0.1)
    no_rows = ints([])
    clock.step(ScheduleBatch(2, ForwardMode.DECODE, no_rows, no_rows, no_rows, no_rows > 0), 9.0)
    assert clock.expected_s(one_row(3)) == pytest.approx(0.1)


def test_between_steps_an_engine_is_late_after_its_last_progress():
    clock = TimedClock()
    for _ in range(3):
        assert clock.late_s(9.0) == 9.0
        clock.turned()
        assert clock.late_s() == 0.0


def test_a_long_step_may_take_five_times_as_long_as_its_tokens_before():
    clock = TimedClock()
    clock.step(one_row(1, ForwardMode.EXTEND, 100), 1.0)
    clock.launched(one_row(2, ForwardMode.EXTEND, 1000))
    assert clock.late_s(49.0) == 0.0
    clock.launched(one_row(3, ForwardMode.EXTEND, 100))  # after it, which is progress, too
    assert clock.late_s(49.0) == 0.0
    assert clock.late_s(2.0) == pytest.approx(1.0)


def test_the_time_limit_of_a_step_ends_with_the_step():
    clock = TimedClock()
    batch = one_row(1, ForwardMode.EXTEND, 100)
    clock.launching(batch)
    clock.step(batch, 50.0)
    assert clock.reading.allowed_s == 0.0


# Seen failing: late after five times the usual duration, and at once after the compilation.
def test_a_kernel_compiled_while_serving_may_take_as_long_as_a_first_step(caplog):
    """A stand-in has the hooks of triton.knobs.runtime, which Triton calls around a compilation."""
    runtime = SimpleNamespace(jit_cache_hook=None, jit_post_compile_hook=None)
    clock = TimedClock(first_step_s=60.0)
    clock.compiles.watch(runtime)
    clock.step(one_row(1), 1.0)
    clock.launching(one_row(2))
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
    clock.step(one_row(1, other), 0.0)
    getattr(clock, begin)(one_row(2, mode))
    assert clock.late_s(59.0) == 0.0
    assert clock.late_s(2.0) == pytest.approx(1.0)


def test_steps_are_counted_by_their_mode_with_their_size_and_time():
    clock = TimedClock()
    for batch, seconds in (
        (one_row(1, ForwardMode.EXTEND, 100), 0.3),
        (one_row(1, ForwardMode.EXTEND, 20), 0.3),
        (one_row(1), 0.02),
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


def test_every_step_is_counted_for_any_times_of_reports():
    """Some times and sizes equal the bounds of buckets."""
    meter = StepMeter()
    seconds, requests = (
        LiveHistogram(distribution.STEP_S),
        LiveHistogram(distribution.BATCH_REQUESTS),
    )
    rng = random.Random(0)
    for step in range(1, 1001):
        taken = rng.choice((*distribution.STEP_S, 0.0, 99.0, rng.random()))
        size = rng.choice((1, 2, 3, 64, 1024, 5000))
        meter.decoded(size, taken)
        seconds.add(taken)
        requests.add(size)
        if step % 301 == 0 or step == 1000:
            counted = meter.distributions()
            assert counted["step_seconds/decode"].counts == seconds.counted().counts
            assert abs(counted["step_seconds/decode"].total - seconds.counted().total) < 1e-6
            assert counted["batch_requests/decode"] == requests.counted()


def test_a_group_of_layers_counts_as_its_part_of_the_forward():
    clock = TimedClock()
    forward = replace(one_row(1, ForwardMode.SPLIT), starts=ints([0]), ends=ints([40]))
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
        one_row(1, ForwardMode.SPLIT), starts=ints([0]), ends=ints([0]), layers=LayerGroup(2, 2, 8)
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
    clock.launched(replace(one_row(1, ForwardMode.IDLE), slots=ints([])))
    assert clock.late_s(3.0) == 3.0
    clock.others_allow_s = 2.0
    assert clock.late_s() == 1.0
    clock.finished()
    assert clock.late_s(1.0) == 1.0
