"""The token ranges of one hand-off that have been published. They follow each other to its end."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.errors import ProtocolViolation
from common.page_tables import PageSpan, PageTables, num_pages_of
from kvtransfer.messages import HandoffKind
from kvtransfer.ports import PIECES, TablePages

_PIECES = PageTables(1)  # one page for each piece


class RangeEnds(NamedTuple):
    """The valid ends of the only range of a hand-off that determines its number of tokens
    itself.
    """

    least: int
    most: int
    step: int  # only multiples of this value

    def __contains__(self, end: object) -> bool:
        return isinstance(end, int) and self.least <= end <= self.most and end % self.step == 0


def granted(
    kind: HandoffKind,
    tables: PageTables,
    *,
    num_tokens: int,
    prefix_tokens: int,
    room_tokens: int,
    destination: PageTables | None = None,
) -> "PageRanges":
    """Return the ranges that may be published for a hand-off of `num_tokens` tokens.

    Args:
        tables: of the producer.
        destination: of the consumer, if its state has another number of pages.
        prefix_tokens: tokens that the consumer has already.
        room_tokens: tokens of a running request for whose KV the consumer has capacity.
    Raises:
        ProtocolViolation: the grant is invalid.
    """
    if kind.in_pieces:
        check_prefix(prefix_tokens, 0, 1)
        return PageRanges(_PIECES, _PIECES, num_tokens, 0, 0, ends=RangeEnds(0, num_tokens, 1))
    ends = None
    if kind is HandoffKind.LIVE:
        check_room(prefix_tokens, num_tokens, room_tokens, tables.page_size)
        ends = RangeEnds(num_tokens, room_tokens, 1)
    else:
        check_prefix(prefix_tokens, num_tokens, tables.page_size)
        if kind is HandoffKind.PREFIX:
            ends = RangeEnds(prefix_tokens, num_tokens, tables.page_size)
    return PageRanges(
        tables, destination or tables, num_tokens, prefix_tokens, prefix_tokens, ends=ends
    )


def table_pages(
    kind: HandoffKind, tables: PageTables, spans: Sequence[PageSpan]
) -> tuple[TablePages, ...]:
    """Return the pages of the spans of a range by table, without those of the state."""
    of_tables = [span for span in spans if span.table < tables.num_tables]
    if kind.in_pieces:
        return tuple(TablePages(PIECES, span.num_pages) for span in of_tables)
    return tuple(TablePages(span.table, span.num_pages) for span in of_tables)


def check_prefix(prefix_tokens: int, num_tokens: int, page_size: int) -> None:
    """Raise ProtocolViolation unless a consumer may already hold a prefix of this length."""
    aligned = prefix_tokens % page_size == 0 or prefix_tokens == num_tokens
    if not 0 <= prefix_tokens <= num_tokens or not aligned:
        raise ProtocolViolation(f"a prefix of {prefix_tokens} tokens of {num_tokens}")


def check_room(prefix_tokens: int, num_tokens: int, room_tokens: int, page_size: int) -> None:
    """Raise ProtocolViolation unless the prefix and the capacity fit a running request, of which
    the consumer knows `num_tokens` tokens.
    """
    if prefix_tokens % page_size or not prefix_tokens <= num_tokens <= room_tokens:
        raise ProtocolViolation(
            f"a prefix of {prefix_tokens} tokens of {num_tokens}, and room for {room_tokens}"
        )


@dataclass(slots=True)
class PageRanges:
    """The ranges of one hand-off. All but the last end at a page boundary. The last ends with the
    tokens, and is the only one that may be empty.
    """

    tables: PageTables  # of the producer, whose pages are published
    destination: PageTables  # of the consumer: the same tables, and its own pages of the state
    num_tokens: int
    start: int  # the prefix that the consumer has
    next: int  # the start of the next range
    complete: bool = False
    # For a running request (which continues meanwhile), a PREFIX and pieces: their only range
    # determines the number of tokens.
    ends: RangeEnds | None = None

    @property
    def num_pages(self) -> int:
        """Return the number of destination pages that the consumer must have."""
        if self.ends is None:
            return num_pages_of(self.destination.handed_over(self.num_tokens, self.start))
        return self.destination.room_pages(self.ends.most, self.start)

    def follow(self, start: int, end: int, num_pages: int, *, last: bool) -> None:
        """Add the range [start, end). Raises ProtocolViolation if it cannot be the next one."""
        wrong = self._complaint(start, end, num_pages, last=last)
        if wrong:
            raise ProtocolViolation(f"range [{start}, {end}) of {self.num_tokens} tokens: {wrong}")
        self.next = end
        self.complete = last
        if self.ends is not None:
            self.num_tokens = end

    def spans(self, start: int, end: int, last: bool) -> tuple[PageSpan, ...]:
        """Return the producer's pages of a range that has been added."""
        return self.tables.spans(self.num_tokens, self.start, start, end, last=last)

    def _complaint(self, start: int, end: int, num_pages: int, *, last: bool) -> str | None:
        if self.complete:
            return "it comes after the last"
        if start != self.next:
            return f"it does not follow the one before, which ended at {self.next}"
        if self.ends is not None:
            if not last or end not in self.ends:
                least, most, step = self.ends
                return f"it must be the only one, and end at {least} to {most}, {step} by {step}"
        elif last and end != self.num_tokens:
            return "it is the last but not the end"
        if not last and (end <= start or end > self.num_tokens or end % self.tables.page_size):
            return "it must end at a later page's edge"
        num_tokens = end if self.ends is not None else self.num_tokens
        spans = self.tables.spans(num_tokens, self.start, start, end, last=last)
        if num_pages != num_pages_of(spans):
            return f"it comes with {num_pages} pages"
        return None
