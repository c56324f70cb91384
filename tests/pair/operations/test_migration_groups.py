"""Migrations that are copied at the same time and continue together."""

from decode_node.queues import PrefixFetchQueue
from engine.batch.request import FinishReason, RequestEnd
from node.messages import MigrateFrom, Placement
from tests.pair.states import make_decode_state
from tests.support.specs import make_request

CANCELLED = RequestEnd(FinishReason.ABORT, "cancelled")


class Fetches:
    """Fetches that end when the test ends them."""

    def __init__(self):
        self.ended = []

    def take_over(self):
        ended, self.ended = self.ended, []
        return ended


class Groups:
    """A queue of migrations from these nodes."""

    def __init__(self, *sources):
        self.fetches = Fetches()
        self.queue = PrefixFetchQueue(self.fetches)
        self.states = []
        for source in sources:
            self.put(source)

    def put(self, source):
        request = make_request([0, 0], key=len(self.states), num_generated=1)
        placement = Placement(move_from=MigrateFrom(source, 100) if source else None)
        self.states.append(make_decode_state(request, placement=placement))
        self.queue.put(self.states[-1])

    def copied(self, key):
        """End the copy of a request. Returns the keys of the requests that continue."""
        self.fetches.ended.append(key)
        return [state.key for state in self.queue.ready()]


def test_migrations_that_are_copied_at_the_same_time_continue_together():
    groups = Groups("a:1", "a:1", "a:1")
    assert groups.copied(0) == groups.copied(1) == []
    assert groups.queue.num_waiting == 3
    assert groups.copied(2) == [0, 1, 2]
    assert groups.queue.num_waiting == 0


def test_a_prompt_waits_for_no_other_fetch():
    groups = Groups("", "", "a:1")
    assert groups.copied(1) == [1]


def test_a_migration_does_not_wait_for_one_from_another_node():
    assert Groups("a:1", "b:2").copied(0) == [0]


def test_a_migration_does_not_wait_for_a_later_one():
    groups = Groups("a:1", "a:1")
    assert groups.copied(0) == []
    groups.put("a:1")
    assert groups.copied(1) == [0]  # the second one waits for the third, and the first does not
    assert groups.copied(2) == [1, 2]


def test_a_migration_does_not_wait_for_one_that_has_ended():
    groups = Groups("a:1", "a:1", "a:1")
    assert groups.copied(0) == groups.copied(1) == []
    for key in (1, 2):
        assert groups.queue.remove(groups.states[key], CANCELLED)
    assert [state.key for state in groups.queue.ready()] == [0]
