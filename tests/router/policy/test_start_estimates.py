"""The router's estimate of the nodes that can start a request in time. The test provides the
clock."""

import math

import pytest

from common.errors import QueueFull
from router.policy.load import (
    LASTING_S,
    WHENEVER,
    DecodeChoice,
    NodeBacklogs,
    NodeLoad,
    PlacementDecision,
    PrefillChoice,
    RequestDue,
)
from tests.support.fake_clock import FakeClock

TOKEN_S = 0.01
CHOICES = [DecodeChoice("d0", (PrefillChoice("p0"), PrefillChoice("p1")))]
ALONE = [DecodeChoice("d0", ())]


class Known:
    """Nodes that have reported their speed and an empty queue."""

    def __init__(self, *addresses: str) -> None:
        self.load, self.clock = NodeLoad(), FakeClock()
        self.backlogs = NodeBacklogs(self.load, self.clock)
        for address in addresses:
            self.backlogs.record(address, queued_s=0.0, token_s=TOKEN_S)

    def due(self, wait_s: float, budget_s: float = 100.0, priority: int = 0) -> RequestDue:
        return RequestDue(self.clock.now + wait_s, self.clock.now + budget_s, priority)

    def take(self, num_tokens: int, due: RequestDue, choices: list[DecodeChoice] = ALONE) -> bool:
        """Return whether a request of this number of tokens is accepted, at any of these nodes."""
        try:
            return self.backlogs.in_time(choices, num_tokens, due) == choices
        except QueueFull:
            return False

    def place(self, *nodes: str, num_tokens: int, wait_s: float = 100.0, priority: int = 0) -> None:
        placement = PlacementDecision(nodes[-1], nodes[:-1], num_tokens)
        self.load.charge(placement, num_tokens, self.clock.now + wait_s, priority)


def test_a_node_with_a_long_queue_is_passed_over():
    known = Known("p0", "p1")
    known.place("p0", "d0", num_tokens=300, wait_s=0.1)
    (choice,) = known.backlogs.in_time(CHOICES, 10, known.due(1.0))
    assert [node.address for node in choice.prefill] == ["p1"]
    assert known.take(10, known.due(3.1), CHOICES)


def test_if_no_node_is_in_time_the_shortest_wait_is_reported():
    known = Known("p0", "p1")
    known.place("p0", "d0", num_tokens=300, wait_s=0.1)
    known.place("p1", "d0", num_tokens=400, wait_s=0.1)
    with pytest.raises(QueueFull) as refused:
        known.backlogs.in_time(CHOICES, 10, known.due(1.0))
    assert refused.value.retry_after_s == pytest.approx(2.0)


def test_the_duration_of_a_request_is_subtracted_from_its_budget():
    known = Known("d0")
    known.place("d0", num_tokens=300, wait_s=0.1)
    assert known.take(100, known.due(10.0, budget_s=4.1))
    assert not known.take(200, known.due(10.0, budget_s=4.1))


def test_idle_nodes_reject_no_request_for_lack_of_time():
    known = Known("p0", "p1", "d0")
    assert known.take(10**6, known.due(0.0, budget_s=0.001), CHOICES)


def test_nodes_without_reports_accept_every_request():
    known = Known()
    known.place("p0", "d0", num_tokens=10**6)
    assert known.take(10, known.due(0.1), CHOICES)


def test_a_running_request_is_never_rejected_and_goes_first():
    known = Known("d0")
    known.place("d0", num_tokens=10**6, wait_s=0.1)
    assert known.backlogs.in_time(ALONE, 10, WHENEVER) is ALONE
    assert known.backlogs.start_by("d0", 10, WHENEVER) == -math.inf


def test_the_rest_of_a_reported_queue_belongs_to_other_routers():
    known = Known()
    known.place("d0", num_tokens=100, wait_s=0.1)
    known.backlogs.record("d0", queued_s=3.0, token_s=TOKEN_S)
    with pytest.raises(QueueFull) as refused:
        known.backlogs.in_time(ALONE, 10, known.due(1.0))
    assert refused.value.retry_after_s == pytest.approx(2.0)
    known.clock.now += 2.0  # until the next report, they are assumed to be computed
    assert known.take(10, known.due(1.1))


def test_a_decode_node_without_pages_is_avoided_until_it_has_some():
    known = Known("p0", "p1")
    known.backlogs.record("d0", queued_s=0.0, token_s=0.0, pages_s=5.0)
    assert not known.take(10, known.due(1.0), CHOICES)
    known.clock.now += 4.1
    assert known.take(10, known.due(1.0), CHOICES)


def test_requests_with_longer_limits_let_some_others_pass():
    known = Known("d0")
    for _ in range(3):
        known.place("d0", num_tokens=100, wait_s=2.5)
    assert known.take(50, known.due(1.0))
    assert not known.take(60, known.due(1.0))


def test_while_requests_with_short_limits_are_rejected_others_wait_no_longer_than_their_limit():
    known = Known("d0")
    known.place("d0", num_tokens=200, wait_s=0.1)
    assert known.take(10, known.due(5.0))
    assert not known.take(10, known.due(1.0))
    assert not known.take(10, known.due(5.0))
    known.clock.now += LASTING_S
    assert known.take(10, known.due(5.0))


def test_a_request_with_a_tiny_limit_does_not_empty_the_queues():
    known = Known("d0")
    known.place("d0", num_tokens=40, wait_s=-1.0)  # it is running
    for _ in range(3):
        assert not known.take(1, known.due(0.001))
    assert known.take(1, known.due(5.0))


# Seen failing without priorities in the order, and if all overtaken requests must stay in time.
def test_of_too_many_requests_those_of_lowest_priority_are_rejected():
    known = Known("d0")
    for _ in range(10):
        known.place("d0", num_tokens=100, wait_s=9.5)
    assert not known.take(100, known.due(5.0))
    assert not known.take(100, known.due(5.0, priority=-1))
    assert known.take(100, known.due(5.0, priority=1))


def test_rejecting_a_low_priority_request_does_not_shorten_the_wait_of_urgent_ones():
    known = Known("d0")
    known.place("d0", num_tokens=200, wait_s=0.1, priority=1)
    assert not known.take(10, known.due(1.0))
    assert known.take(10, known.due(5.0, priority=1))
    assert not known.take(10, known.due(1.0, priority=1))
    for priority in (1, 0, -1):
        assert not known.take(10, known.due(5.0, priority=priority))


@pytest.mark.parametrize("lie", [math.nan, math.inf, -1.0, 1e9])
def test_impossible_reports_are_ignored(lie):
    known = Known()
    known.place("d0", num_tokens=100, wait_s=0.1)
    known.backlogs.record("d0", queued_s=lie, token_s=lie, pages_s=lie)
    assert known.take(10, known.due(0.1))


def test_a_restarted_node_starts_with_an_empty_queue():
    known = Known("d0")
    known.place("d0", num_tokens=300, wait_s=0.1)
    known.backlogs.forget("d0")
    assert known.take(10, known.due(1.0))
