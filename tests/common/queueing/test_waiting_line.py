"""Requests of a queue that would miss their deadline after one more admission."""

import math
import random

import pytest

from common.queueing import STEP_S, QueueEntry, QueueModel

FIRST = -math.inf
UNIT_S = 1 / 128  # sums of it are exact


def line(*places: QueueEntry) -> QueueModel:
    made = QueueModel()
    for who, place in enumerate(places):
        made.join(who, place)
    return made


def plainly(places: list[QueueEntry], newcomer: QueueEntry, begins: float, unit_s: float) -> float:
    """Return the lateness of the new request, or of a request that it makes late.

    Serves the queue with and without the new request.
    """

    def starts(served: list[QueueEntry]) -> dict[int, float]:
        at, started = begins, {}
        for place in sorted(served, key=lambda place: (place.turn, place is newcomer, place)):
            started[id(place)] = at
            at += place.units * unit_s
        return started

    before, after = starts(places), starts([*places, newcomer])
    in_time = [place for place in places if before[id(place)] <= place.start_by]
    passed = [place for place in in_time if place.turn > newcomer.turn]
    passed = [place for place in passed if place.priority >= newcomer.priority]
    return max(after[id(place)] - place.start_by for place in [*passed, newcomer])


def test_a_priority_step_equals_a_limited_number_of_seconds():
    waiting = line(QueueEntry(FIRST, 100, came=100.0), QueueEntry(FIRST, 100, came=200.0))
    newcomer = QueueEntry(1000.0, 1, priority=2, came=200.0 + 2 * STEP_S - 1.0)
    assert waiting.late_s(newcomer, begins=0.0, unit_s=0.01)[1] == pytest.approx(1.0)
    later = newcomer._replace(came=200.0 + 2 * STEP_S + 1.0)
    assert waiting.late_s(later, begins=0.0, unit_s=0.01)[1] == pytest.approx(2.0)


# Seen failing if requests behind are not subtracted, and if equal times count as later ones.
@pytest.mark.parametrize("seed", range(20))
def test_after_any_changes_the_result_is_as_if_the_queue_were_served(seed):
    rng = random.Random(seed)
    waiting = QueueModel()
    places: dict[int, QueueEntry] = {}
    for who in range(200):
        urgency = rng.choice((0, 0, 0, 1, -1))
        newcomer = QueueEntry(rng.choice([FIRST, *range(20)]), rng.randrange(1, 150), urgency)
        late, ahead_s = waiting.late_s(newcomer, begins=1.0, unit_s=UNIT_S)
        ahead = [each.units for each in places.values() if each.turn <= newcomer.turn]
        assert ahead_s == pytest.approx(sum(ahead) * UNIT_S)
        assert late == pytest.approx(plainly(list(places.values()), newcomer, 1.0, UNIT_S))
        waiting.join(who, newcomer)
        places[who] = newcomer
        if rng.random() < 0.7:
            gone = rng.choice(list(places))
            waiting.leave(gone)
            del places[gone]
        assert len(waiting) == len(places)
        assert waiting.units == sum(each.units for each in places.values())
