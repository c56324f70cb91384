"""Estimate of a queue's drain time, from its recent throughput. The test provides the clock."""

import math

import pytest

from common.errors import QueueFull
from common.queueing import ENOUGH_SAMPLES, STALL_S, QueueEntry, QueueEstimator, may_wait_s

FIRST = -math.inf


def serve(drain: QueueEstimator, at: float, *took_s: float, units: int = 10) -> float:
    """Serve entries one after the other, each in so many seconds. Return the time."""
    for each in took_s:
        drain.join(0, QueueEntry(FIRST, units), at)
        at += each
        drain.serve(0)
        drain.tick(at)
    return at


def drained(unit_s: float = 0.01, steps: int = 50) -> tuple[QueueEstimator, float]:
    """A queue that has served 10 units at a time, `unit_s` each; and the time."""
    drain = QueueEstimator()
    return drain, serve(drain, 100.0, *[10 * unit_s] * steps)


def test_nothing_is_known_and_nothing_refused_at_the_start():
    drain = QueueEstimator()
    at = serve(drain, 0.0, *[10.0] * (ENOUGH_SAMPLES - 1), units=1000)
    drain.join(100, QueueEntry(FIRST, 10**6), at)
    drain.check(QueueEntry(at, 1), at)
    assert drain.backlog == (0.0, 0.0)


def test_the_first_steps_of_a_process_are_no_measure():
    drain = QueueEstimator()
    serve(drain, 0.0, 60.0, 60.0, *[0.1] * (ENOUGH_SAMPLES - 2))
    assert drain.unit_s == pytest.approx(0.01)


def test_what_waits_is_as_long_as_what_went_through_it_took():
    drain, at = drained(unit_s=0.01)
    drain.join(1000, QueueEntry(FIRST, 200), at)
    drain.join(1001, QueueEntry(FIRST, 100), at)
    assert drain.queued_s == pytest.approx(3.0)
    drain.serve(1000, left=150)
    assert drain.queued_s == pytest.approx(2.5)
    drain.leave(1001)
    assert drain.queued_s == pytest.approx(1.5)


def test_what_cannot_be_begun_in_time_is_refused_and_told_when_to_come_again():
    drain, at = drained(unit_s=0.01)
    drain.join(1000, QueueEntry(FIRST, 300), at)
    drain.check(QueueEntry(at + 3.01, 10), at)
    with pytest.raises(QueueFull) as refused:
        drain.check(QueueEntry(at + 1.0, 10), at)
    assert refused.value.retry_after_s == pytest.approx(2.0)


def test_an_idle_queue_takes_everything_however_slow_it_was():
    drain, at = drained(unit_s=5.0)
    drain.check(QueueEntry(at - 100.0, 10**6), at)


def test_an_hour_without_work_says_nothing():
    drain, at = drained(unit_s=0.01)
    serve(drain, at + 3600.0, 0.1)
    assert drain.unit_s == pytest.approx(0.01)


def test_a_pause_in_the_midst_of_work_does_not_make_a_node_slow():
    drain, at = drained(unit_s=0.01)
    at = serve(drain, at, 60.0)
    assert drain.unit_s < 0.01 + STALL_S / 100
    serve(drain, at, *[0.1] * 100)
    assert drain.unit_s == pytest.approx(0.01, rel=0.1)


def test_a_node_that_has_become_slower_is_known_to_be_within_its_next_steps():
    drain, at = drained(unit_s=0.01, steps=500)
    serve(drain, at, *[1.0] * 100)
    assert drain.unit_s == pytest.approx(0.1, rel=0.1)


def test_who_is_served_anew_counts_once():
    drain, at = drained()
    drain.join(1000, QueueEntry(FIRST, 100), at)
    drain.serve(1000, left=50)
    drain.serve(1000, left=80)  # it was retracted, and is computed anew
    assert drain.queued_s == pytest.approx(0.5)
    drain.serve(1000)
    drain.serve(1000, left=20)
    assert drain.queued_s == 0.0


@pytest.mark.parametrize(
    "queue_s, budget_s, work_s, expected",
    [(1.0, 10.0, 2.0, 1.0), (9.0, 10.0, 2.0, 8.0), (9.0, 10.0, 70.0, 5.0), (1e9, 10.0, 0.0, 10.0)],
)
def test_work_is_kept_free_of_a_budget_but_for_half_of_it_at_most(
    queue_s, budget_s, work_s, expected
):
    assert may_wait_s(queue_s, budget_s, work_s) == expected
