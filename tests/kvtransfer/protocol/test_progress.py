"""Valid ranges of grants and publications, for each kind of hand-off, and deadlines."""

import random

import pytest

from common.errors import ProtocolViolation
from common.page_tables import PageTables
from kvtransfer.messages import Embeddings, Live, Prefix, Source, Weights
from kvtransfer.protocol.progress import DeadlineTimer, PageRanges, granted

TABLES = PageTables(4)


def of(kind: type[Source], *, tokens: int = 7, prefix: int = 0, room: int = 0) -> PageRanges:
    return granted(kind, TABLES, num_tokens=tokens, prefix_tokens=prefix, room_tokens=room)


# Seen failing, each, without its check.
@pytest.mark.parametrize(
    "kind, prefix, room",
    [
        pytest.param(Live, 0, 6, id="live-less-room-than-tokens"),
        pytest.param(Live, 3, 9, id="live-prefix-within-a-page"),
        pytest.param(Live, 8, 9, id="live-prefix-of-more-tokens"),
        pytest.param(Weights, 1, 0, id="weights-with-a-prefix"),
        pytest.param(Embeddings, 1, 0, id="embeddings-with-a-prefix"),
        pytest.param(Prefix, 3, 0, id="prefix-within-a-page"),
    ],
)
def test_an_impossible_grant_is_a_violation(kind, prefix, room):
    with pytest.raises(ProtocolViolation):
        of(kind, prefix=prefix, room=room)


# Seen failing, each, without its check.
@pytest.mark.parametrize(
    "kind, end, num_pages, last",
    [
        pytest.param(Live, 8, 2, False, id="live-in-two-ranges"),
        pytest.param(Live, 6, 2, True, id="live-fewer-than-opened"),
        pytest.param(Live, 13, 4, True, id="live-more-than-there-is-room-for"),
        pytest.param(Prefix, 6, 2, True, id="prefix-within-a-page"),
        pytest.param(Prefix, 4, 1, False, id="prefix-in-two-ranges"),
        pytest.param(Weights, 8, 8, True, id="weights-more-than-opened"),
    ],
)
def test_an_impossible_range_is_a_violation(kind, end, num_pages, last):
    ranges = of(kind, room=12 if kind is Live else 0)
    with pytest.raises(ProtocolViolation, match="it must"):
        ranges.follow(0, end, num_pages, last=last)


@pytest.mark.parametrize(
    "kind, end, num_pages",
    [
        (Live, 7, 2),
        (Live, 12, 3),
        (Prefix, 4, 1),
        (Weights, 7, 7),
        (Embeddings, 7, 7),
    ],
)
def test_a_range_of_a_running_request_may_end_anywhere_in_the_grant(kind, end, num_pages):
    ranges = of(kind, room=12 if kind is Live else 0)
    ranges.follow(0, end, num_pages, last=True)
    assert (ranges.complete, ranges.num_tokens) == (True, end)


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
