"""Times at which an end sends heartbeats, and detection of its silent streams."""

from common.config import TransferConfig
from kvtransfer.protocol.liveness import HeartbeatTimer

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
    assert (due.beats, due.silent) == ([2], [2])


def test_who_does_not_move_does_not_beat():
    beats = HeartbeatTimer(CONFIG)
    beats.start(1, now=0.0)
    beats.moving = False
    assert beats.take_due(1.0).beats == []
    beats.moving = True
    assert beats.take_due(2.0).beats == [1]
