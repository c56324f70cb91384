"""Preparation of requests in several queues before they are scheduled."""

from unittest.mock import Mock

import pytest

from common.errors import InvalidRequest
from common.queueing import QueueEstimator
from engine.batch.request import FinishReason, RequestEnd
from engine.scheduler.scheduler import DEADLINE_CHECK_S
from node.queues import PreparationStages, RequestQueues
from node.request_state import RequestStage, RequestState
from tests.support.specs import make_request

END = RequestEnd(FinishReason.ABORT)


class Needs:
    """A queue for requests whose name has its letter. They leave it when the test says so."""

    def __init__(self, name):
        self.name = name
        self.waiting = {}
        self.refusals = {}
        self.opened = set()
        self.always = False

    def __len__(self):
        return len(self.waiting)

    def needed_by(self, request):
        return self.name in request.spec.request_id

    def put(self, request):
        if request.key in self.refusals:
            raise self.refusals[request.key]
        self.waiting[request.key] = request

    def ready(self, now):
        for key in [key for key in self.waiting if self.always or key in self.opened]:
            yield self.waiting.pop(key), self.refusals.get(key)

    def remove(self, request):
        return self.waiting.pop(request.key, None) is not None


class Backlog(QueueEstimator):
    queued_s = 7.0


@pytest.fixture
def lines():
    return Needs("a"), Needs("b"), Needs("c")


@pytest.fixture
def preparations(lines):
    return PreparationStages(Backlog(), *lines)


def a_state(key, needs="", **fields):
    request = make_request([0] * 4, key=key, request_id=needs, **fields)
    return RequestState(request, lambda state, ending: None)


def taken(preparations):
    return [(state.key, refusal) for state, refusal in preparations.ready(0.0)]


def test_a_request_without_needs_is_prepared_at_once_and_in_order(preparations):
    for key in (3, 1, 2):
        preparations.put(a_state(key))
    assert preparations.num_waiting == 3
    assert taken(preparations) == [(3, None), (1, None), (2, None)]
    assert preparations.num_waiting == 0
    assert taken(preparations) == []


def test_each_request_passes_its_queues_in_order(preparations, lines):
    a, b, c = lines
    preparations.put(a_state(1, "ca"))
    preparations.put(a_state(2, "b"))
    b.always = c.always = True
    assert preparations.lengths() == {"a": 1, "b": 1, "c": 0}
    assert taken(preparations) == [(2, None)]
    assert preparations.lengths() == {"a": 1, "b": 0, "c": 0}
    c.always, a.always = False, True
    assert taken(preparations) == []
    assert preparations.lengths() == {"a": 0, "b": 0, "c": 1}
    c.always = True
    assert taken(preparations) == [(1, None)]


def test_queues_that_end_at_once_are_passed_in_one_call(preparations, lines):
    for line in lines:
        line.always = True
    preparations.put(a_state(1, "abc"))
    assert taken(preparations) == [(1, None)]


def test_a_request_whose_needs_cannot_be_met_is_rejected_in_any_queue(preparations, lines):
    a, b, _ = lines
    no = InvalidRequest("no")
    a.refusals[1] = no
    with pytest.raises(InvalidRequest):
        preparations.put(a_state(1, "a"))
    assert preparations.num_waiting == 0
    preparations.put(a_state(2, "ab"))  # accepted by the first queue, not by the second
    preparations.put(a_state(3, "bc"))  # rejected later by the second
    b.refusals = {2: no, 3: no}
    a.opened, b.opened = {2}, {3}
    assert taken(preparations) == [(2, no), (3, no)]
    assert preparations.num_waiting == 0 and not any(lines)


def test_a_request_that_is_taken_may_make_room_in_an_earlier_queue(preparations, lines):
    """For example by its end. Otherwise the earlier queue would not be checked again before
    another event."""
    a, b, _ = lines
    preparations.put(a_state(1, "a"))
    preparations.put(a_state(2, "b"))
    b.always = True
    seen = []
    for state, _ in preparations.ready(0.0):
        seen.append(state.key)
        a.opened.add(1)
    assert seen == [2, 1]


@pytest.mark.parametrize("needs", ["", "a", "b"])
def test_a_request_that_ends_is_in_no_queue(preparations, lines, needs):
    state = a_state(1, needs)
    preparations.put(state)
    assert state.stage is RequestStage.PREPARING and state.queue is preparations
    assert preparations.remove(state, END)
    for line in lines:
        line.always = True
    assert taken(preparations) == [] and not any(lines) and preparations.num_waiting == 0


def test_a_request_that_times_out_ends_and_the_others_stay(preparations, lines):
    preparations.put(a_state(1, "a", deadline=5.0))
    preparations.put(a_state(2, "b", start_by=5.0))
    preparations.put(a_state(3, "a"))
    preparations.put(a_state(4, deadline=5.0))
    assert list(preparations.expired(5.0)) == []
    ended = list(preparations.expired(5.1))
    assert [state.key for state, _ in ended] == [1, 2, 4]
    assert ended[0][1].error.startswith("deadline")
    assert ended[1][1].retry_after_s == 7.0
    assert preparations.lengths() == {"a": 1, "b": 0, "c": 0} and preparations.num_waiting == 1


def test_deadlines_of_all_queues_of_a_role_are_checked_at_intervals(preparations, lines):
    scheduled = Mock(**{"expired.return_value": [], "scheduler.awaits_masks": False})
    queues = RequestQueues(scheduled, preparations)

    def ended(now):
        return [state.key for state, _ in queues.expired(now)]

    preparations.put(a_state(1, "a", deadline=5.0))
    assert ended(5.1) == [1]
    preparations.put(a_state(2, "a", deadline=5.0))
    assert ended(5.1 + DEADLINE_CHECK_S / 2) == []
    assert scheduled.expired.call_count == 1
    scheduled.scheduler.awaits_masks = True  # its rows are released in each poll, deadlines wait
    assert ended(5.1 + DEADLINE_CHECK_S / 2) == []
    assert scheduled.expired.call_count == 2
    assert ended(5.1 + DEADLINE_CHECK_S) == [2]
