"""Which of those that are copied go together."""

from decode_node.migration_groups import MigrationGroups
from node.messages import MigrateFrom
from tests.support.specs import make_request

REQUESTS = [make_request([0, 0], key=key, num_generated=1) for key in range(4)]


def _convoys(*sources: str) -> MigrationGroups:
    convoys = MigrationGroups()
    for request, address in zip(REQUESTS, sources, strict=False):
        convoys.put(request, MigrateFrom(address, 100 + request.key))
    return convoys


def _gone(convoys: MigrationGroups) -> list[tuple[int, int]]:
    return [(request.key, source.ticket) for request, source in convoys.take()]


def test_those_that_are_copied_at_the_same_time_go_together() -> None:
    convoys = _convoys("a:1", "a:1", "a:1")
    for request in REQUESTS[:2]:
        convoys.copied(request)
        assert _gone(convoys) == []
    assert len(convoys) == 2
    convoys.copied(REQUESTS[2])
    assert _gone(convoys) == [(0, 100), (1, 101), (2, 102)]
    assert not len(convoys) and REQUESTS[0] not in convoys


def test_nobody_waits_for_who_is_at_another_node() -> None:
    convoys = _convoys("a:1", "b:2")
    convoys.copied(REQUESTS[0])
    assert _gone(convoys) == [(0, 100)]


def test_nobody_waits_for_who_comes_later() -> None:
    convoys = _convoys("a:1", "a:1")
    convoys.copied(REQUESTS[0])
    convoys.put(REQUESTS[2], MigrateFrom("a:1", 102))
    convoys.copied(REQUESTS[1])  # which waits for that one, and the first one does not
    assert _gone(convoys) == [(0, 100)]
    convoys.copied(REQUESTS[2])
    assert _gone(convoys) == [(1, 101), (2, 102)]


def test_nobody_waits_for_who_is_given_up() -> None:
    convoys = _convoys("a:1", "a:1", "a:1")
    convoys.copied(REQUESTS[0])
    convoys.copied(REQUESTS[1])
    assert convoys.remove(REQUESTS[1])
    assert not convoys.remove(REQUESTS[2])  # its copy is under way
    assert _gone(convoys) == [(0, 100)] and REQUESTS[1] not in convoys
