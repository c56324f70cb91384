"""Valid ranges of grants and publications, for each kind of hand-off."""

import pytest

from common.errors import ProtocolViolation
from common.page_tables import PageTables
from kvtransfer.messages import HandoffKind
from kvtransfer.protocol.progress import PageRanges, granted

TABLES = PageTables(4)


def of(kind: HandoffKind, *, tokens: int = 7, prefix: int = 0, room: int = 0) -> PageRanges:
    return granted(kind, TABLES, num_tokens=tokens, prefix_tokens=prefix, room_tokens=room)


# Seen failing, each, without its check.
@pytest.mark.parametrize(
    "kind, prefix, room",
    [
        pytest.param(HandoffKind.LIVE, 0, 6, id="live-less-room-than-tokens"),
        pytest.param(HandoffKind.LIVE, 3, 9, id="live-prefix-within-a-page"),
        pytest.param(HandoffKind.LIVE, 8, 9, id="live-prefix-of-more-tokens"),
        pytest.param(HandoffKind.WEIGHTS, 1, 0, id="weights-with-a-prefix"),
        pytest.param(HandoffKind.EMBEDDINGS, 1, 0, id="embeddings-with-a-prefix"),
        pytest.param(HandoffKind.PREFIX, 3, 0, id="prefix-within-a-page"),
    ],
)
def test_an_impossible_grant_is_a_violation(kind, prefix, room):
    with pytest.raises(ProtocolViolation):
        of(kind, prefix=prefix, room=room)


# Seen failing, each, without its check.
@pytest.mark.parametrize(
    "kind, end, num_pages, last",
    [
        pytest.param(HandoffKind.LIVE, 8, 2, False, id="live-in-two-ranges"),
        pytest.param(HandoffKind.LIVE, 6, 2, True, id="live-fewer-than-opened"),
        pytest.param(HandoffKind.LIVE, 13, 4, True, id="live-more-than-there-is-room-for"),
        pytest.param(HandoffKind.PREFIX, 6, 2, True, id="prefix-within-a-page"),
        pytest.param(HandoffKind.PREFIX, 4, 1, False, id="prefix-in-two-ranges"),
        pytest.param(HandoffKind.WEIGHTS, 8, 8, True, id="weights-more-than-opened"),
    ],
)
def test_an_impossible_range_is_a_violation(kind, end, num_pages, last):
    ranges = of(kind, room=12 if kind is HandoffKind.LIVE else 0)
    with pytest.raises(ProtocolViolation, match="it must"):
        ranges.follow(0, end, num_pages, last=last)


@pytest.mark.parametrize(
    "kind, end, num_pages",
    [
        (HandoffKind.LIVE, 7, 2),
        (HandoffKind.LIVE, 12, 3),
        (HandoffKind.PREFIX, 4, 1),
        (HandoffKind.WEIGHTS, 7, 7),
        (HandoffKind.EMBEDDINGS, 7, 7),
    ],
)
def test_a_range_of_a_running_request_may_end_anywhere_in_the_grant(kind, end, num_pages):
    ranges = of(kind, room=12 if kind is HandoffKind.LIVE else 0)
    ranges.follow(0, end, num_pages, last=True)
    assert (ranges.complete, ranges.num_tokens) == (True, end)
