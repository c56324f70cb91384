"""The watchdog: the standstills of an engine that it reports, and how often."""

import threading

import pytest

from engine.loop.step_clock import StepClock
from engine.loop.watchdog import Watchdog
from tests.engine.loop.test_step_clock import TimedClock, one_row


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
    watched.clock.launched(one_row(1))
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
        watched.clock.step(one_row(1), 0.0)
        assert watched.look_for(9) == 0
    assert watched.look_for(11) == 1
    watched.clock.step(one_row(2), 0.0)
    assert [watched.look_for(s) for s in (1, 11)] == [1, 2]


def test_a_process_that_was_stopped_itself_reports_no_standstill():
    """Seen failing if the time between two checks counts in full."""
    watched = Watched()
    watched.work = True
    watched.look_for(1)
    watched.time.now += 3600.0
    assert watched.look_for(1) == 0
    watched.clock.step(one_row(1), 0.0)
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
