"""Deadlines against the plainest account of them: a dictionary."""

import random

from common.config import TransferConfig
from kvtransfer.protocol.progress import DeadlineTimer, HeartbeatTimer


# Seen failing with a heap that is empty after it is rebuilt, and with a moved deadline due at its
# old time.
def test_deadlines_are_due_once_in_order_however_often_they_move():
    rng = random.Random(3)
    deadlines, plain = DeadlineTimer[int](), dict[int, float]()
    for now in range(500):
        for _ in range(10):
            key = rng.randrange(12)
            if rng.random() < 0.1:
                deadlines.drop(key)
                plain.pop(key, None)
            else:
                plain[key] = now + rng.randrange(1, 200)
                deadlines.set(key, plain[key])
        assert deadlines.next() == min(plain.values(), default=None)
        due = sorted((when, key) for key, when in plain.items() if when <= now)
        assert deadlines.take_due(now) == [key for _, key in due]
        for _, key in due:
            del plain[key]
    assert len(deadlines._heap) < 200  # entries that were moved do not pile up


# Heartbeats ---------------------------------------------------------------------------------------


CONFIG = TransferConfig(heartbeat_s=1.0, max_missed_heartbeats=3)


def test_a_stream_is_silent_after_so_many_missed_beats():
    beats = HeartbeatTimer(CONFIG)
    beats.start(1, now=0.0)
    beats.heard(1, now=2.0)
    assert beats.take_due(4.9).silent == []
    assert beats.take_due(5.0).silent == [1]


def test_a_stream_that_is_over_is_neither_silent_nor_beaten_on():
    beats = HeartbeatTimer(CONFIG)
    beats.start(1, now=0.0)
    beats.start(2, now=0.0)
    beats.stop(1)
    due = beats.take_due(100.0)
    assert (due.heartbeats, due.silent) == ([2], [2])


def test_who_does_not_move_does_not_beat():
    beats = HeartbeatTimer(CONFIG)
    beats.start(1, now=0.0)
    beats.moving = False
    assert beats.take_due(1.0).heartbeats == []
    beats.moving = True
    assert beats.take_due(2.0).heartbeats == [1]
