"""Estimate of a queue's drain time, from its recent throughput. The test provides the clock."""

import math

import pytest

from common.errors import QueueFull
from common.queueing import ENOUGH_SAMPLES, STALL_S, QueueEntry, QueueEstimator, may_wait_s

FIRST = -math.inf


def serve(drain: QueueEstimator, at: float, *took_s: float, units: int = 10) -> float:
    """Serve entries one after the other, each in this number of seconds. Return the time."""
    for each in took_s:
        drain.join(0, QueueEntry(FIRST, units), at)
        at += each
        drain.serve(0)
        drain.tick(at)
    return at


def drained(unit_s: float = 0.01, steps: int = 50) -> tuple[QueueEstimator, float]:
    """Return a queue that has served 10 units at a time, each in `unit_s`, and the time."""
    drain = QueueEstimator()
    return drain, serve(drain, 100.0, *[10 * unit_s] * steps)


def test_at_the_start_the_rate_is_unknown_and_no_request_rejected():
    drain = QueueEstimator()
    at = serve(drain, 0.0, *[10.0] * (ENOUGH_SAMPLES - 1), units=1000)
    drain.join(100, QueueEntry(FIRST, 10**6), at)
    drain.check(QueueEntry(at, 1), at)
    assert drain.backlog == (0.0, 0.0)


def test_the_first_steps_of_a_process_do_not_count():
    drain = QueueEstimator()
    serve(drain, 0.0, 60.0, 60.0, *[0.1] * (ENOUGH_SAMPLES - 2))
    assert drain.unit_s == pytest.approx(0.01)


def test_the_estimate_follows_from_the_throughput():
    drain, at = drained(unit_s=0.01)
    drain.join(1000, QueueEntry(FIRST, 200), at)
    drain.join(1001, QueueEntry(FIRST, 100), at)
    assert drain.queued_s == pytest.approx(3.0)
    drain.serve(1000, left=150)
    assert drain.queued_s == pytest.approx(2.5)
    drain.leave(1001)
    assert drain.queued_s == pytest.approx(1.5)


def test_a_request_that_cannot_start_in_time_is_rejected_with_a_retry_time():
    drain, at = drained(unit_s=0.01)
    drain.join(1000, QueueEntry(FIRST, 300), at)
    drain.check(QueueEntry(at + 3.01, 10), at)
    with pytest.raises(QueueFull) as refused:
        drain.check(QueueEntry(at + 1.0, 10), at)
    assert refused.value.retry_after_s == pytest.approx(2.0)


def test_an_idle_queue_accepts_every_request_however_slow_it_was():
    drain, at = drained(unit_s=5.0)
    drain.check(QueueEntry(at - 100.0, 10**6), at)


def test_an_hour_without_work_does_not_change_the_rate():
    drain, at = drained(unit_s=0.01)
    serve(drain, at + 3600.0, 0.1)
    assert drain.unit_s == pytest.approx(0.01)


def test_a_pause_during_work_does_not_lower_the_rate():
    drain, at = drained(unit_s=0.01)
    at = serve(drain, at, 60.0)
    assert drain.unit_s < 0.01 + STALL_S / 100
    serve(drain, at, *[0.1] * 100)
    assert drain.unit_s == pytest.approx(0.01, rel=0.1)


def test_a_slower_node_is_detected_within_a_few_steps():
    drain, at = drained(unit_s=0.01, steps=500)
    serve(drain, at, *[1.0] * 100)
    assert drain.unit_s == pytest.approx(0.1, rel=0.1)


def test_a_request_served_again_counts_once():
    drain, at = drained()
    drain.join(1000, QueueEntry(FIRST, 100), at)
    drain.serve(1000, left=50)
    drain.serve(1000, left=80)  # it was retracted, and is computed again
    assert drain.queued_s == pytest.approx(0.5)
    drain.serve(1000)
    drain.serve(1000, left=20)
    assert drain.queued_s == 0.0


@pytest.mark.parametrize(
    "queue_s, budget_s, work_s, expected",
    [(1.0, 10.0, 2.0, 1.0), (9.0, 10.0, 2.0, 8.0), (9.0, 10.0, 70.0, 5.0), (1e9, 10.0, 0.0, 10.0)],
)
def test_at_most_half_of_the_budget_is_reserved_for_the_requests_own_work(
    queue_s, budget_s, work_s, expected
):
    assert may_wait_s(queue_s, budget_s, work_s) == expected
