"""Deadlines, compared with a plain dictionary."""

import random

from kvtransfer.protocol.progress import DeadlineTimer


# Seen failing with a heap that is empty after a rebuild, and with a moved deadline due at its old
# time.
def test_deadlines_expire_once_and_in_order_after_any_moves():
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
    assert len(deadlines._heap) < 200  # entries of moved deadlines do not accumulate
