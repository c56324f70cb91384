"""Which pages a request has, by numbers of tokens alone: a table of pages for each group of layers
that keep KV alike, full ones and those of which only a window of tokens is ever looked at; and
those of its state, which are as many whatever its length.

Pure arithmetic, for whoever sizes, reserves, frees or hands over pages. It knows neither models nor
page numbers.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple


class Span(NamedTuple):
    """Pages [first, past) of one table of a request; page j has tokens from j * page_size on. The
    state is the table after the last."""

    table: int
    first: int
    past: int

    @property
    def num_pages(self) -> int:
        return self.past - self.first


@dataclass(frozen=True, slots=True)
class PageTables:
    """The tables of every request. All pages are equally large, whatever is in them.

    windows: by table, how many tokens a query sees, its own included; None: all.
    state_pages: of what is kept of a request as a whole.
    """

    page_size: int
    windows: tuple[int | None, ...] = (None,)
    state_pages: int = 0

    @property
    def num_tables(self) -> int:
        return len(self.windows)

    @property
    def width(self) -> int:
        """Pages that go with one page of tokens, its state's too."""
        return self.num_tables + self.state_pages

    @property
    def num_full(self) -> int:
        return self.windows.count(None)

    @property
    def sliding(self) -> tuple[tuple[int, int], ...]:
        """(table, window) of those that have one."""
        return tuple((t, window) for t, window in enumerate(self.windows) if window is not None)

    def num_pages(self, num_tokens: int) -> int:
        """Of one table, none of them freed."""
        return -(-num_tokens // self.page_size)

    def live_from(self, table: int, num_tokens: int) -> int:
        """The first page of a table that may still be looked at when so many tokens have their KV.

        Counted from the last page's edge, not from the last token: so that at that edge a request
        can always be gone on from, and a step behind may still read.
        """
        window = self.windows[table]
        if window is None:
            return 0
        edge = num_tokens // self.page_size * self.page_size
        return max(0, edge - window + 1) // self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """What a request holds whose tokens all have their KV."""
        num_pages = self.num_pages(num_tokens)
        live = sum(num_pages - self.live_from(t, num_tokens) for t in range(self.num_tables))
        return live + self.state_pages

    def pages_to_compute(self, num_tokens: int) -> int:
        """What computing a prompt reserves: all of its pages, freed chunk by chunk."""
        return self.num_pages(num_tokens) * self.num_tables + self.state_pages

    def max_tokens(self, num_pages: int) -> int:
        """Of the longest prompt that a pool of so many pages can compute."""
        return max(0, num_pages - self.state_pages) // self.num_tables * self.page_size

    def most_live(self, table: int) -> float:
        """Pages of one request that can be live at once while it grows."""
        window = self.windows[table]
        return math.inf if window is None else self.num_pages(window - 1) + 2

    def growth(self, num_tokens: int, more_pages: int) -> int:
        """Of a request whose tokens all have their KV, and that needs so many more pages in each
        full table: a window is full at some time."""
        held = self.num_pages(num_tokens)
        return self.num_full * more_pages + sum(
            int(min(more_pages, self.most_live(t) - (held - self.live_from(t, num_tokens))))
            for t, _ in self.sliding
        )

    def handed_over(self, num_tokens: int, prefix: int) -> tuple[Span, ...]:
        """The pages that a reader gets of a request which has `prefix` tokens in its full tables:
        what is behind, of each other table what is live at the end, and the state."""
        tables = tuple(self._handed(t, num_tokens, prefix) for t in range(self.num_tables))
        return tables + self._state

    def room_pages(self, num_tokens: int, prefix: int) -> int:
        """As many as are handed over of any number of tokens up to so many."""
        num_pages = self.num_pages(num_tokens)
        behind = self.num_full * (num_pages - self.num_pages(prefix))
        live = sum(int(min(num_pages, self.most_live(t))) for t, _ in self.sliding)
        return behind + live + self.state_pages

    def spans(
        self, num_tokens: int, prefix: int, start: int, end: int, *, last: bool
    ) -> tuple[Span, ...]:
        """What of it goes with the range [start, end): over all ranges from `prefix` on each page
        comes exactly once. With the first range goes also what windows reach before the prefix, and
        with the last one, which may be empty, the state."""
        past = self.num_pages(end)
        spans = []
        for all_of_it in self.handed_over(num_tokens, prefix)[: self.num_tables]:
            first = all_of_it.first if start == prefix else self.num_pages(start)
            first = max(first, all_of_it.first)
            if first < past:
                spans.append(Span(all_of_it.table, first, past))
        return (*spans, *(self._state if last else ()))

    @property
    def _state(self) -> tuple[Span, ...]:
        return (Span(self.num_tables, 0, self.state_pages),) if self.state_pages else ()

    def _handed(self, table: int, num_tokens: int, prefix: int) -> Span:
        full = self.windows[table] is None
        first = self.num_pages(prefix) if full else self.live_from(table, num_tokens)
        return Span(table, first, self.num_pages(num_tokens))


def num_pages_of(spans: tuple[Span, ...]) -> int:
    return sum(span.num_pages for span in spans)
