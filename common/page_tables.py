"""Page counts of a request, computed from numbers of tokens.

A request has one page table for each group of layers with the same attention: full tables, and
tables that use only a window of tokens. Its recurrent state takes a fixed number of pages. Used for
sizing, reservation, freeing and hand-offs, independent of models and page numbers.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class PageSpan(NamedTuple):
    """Pages [first, past) of one table of a request. Page j has the tokens from j * page_size on.

    The recurrent state counts as an additional last table.
    """

    table: int
    first: int
    past: int

    @property
    def num_pages(self) -> int:
        return self.past - self.first


@dataclass(frozen=True)
class PageTables:
    """The page tables that every request has. All pages have the same size in bytes.

    Attributes:
        page_size: tokens per page.
        windows: for each table, the number of tokens that a query attends to, including its own.
            None: all tokens.
        state_pages: pages of the recurrent state of a request.
    """

    page_size: int
    windows: tuple[int | None, ...] = (None,)
    state_pages: int = 0

    @cached_property
    def num_tables(self) -> int:
        return len(self.windows)

    @cached_property
    def width(self) -> int:
        """Pages for one page of tokens in all tables, plus the state."""
        return self.num_tables + self.state_pages

    @cached_property
    def num_full(self) -> int:
        return self.windows.count(None)

    @cached_property
    def sliding(self) -> tuple[tuple[int, int], ...]:
        """(table, window) of all tables with a window."""
        return tuple((t, window) for t, window in enumerate(self.windows) if window is not None)

    def num_pages(self, num_tokens: int) -> int:
        """Return the pages of one table if none is freed."""
        return -(-num_tokens // self.page_size)

    def live_from(self, table: int, num_tokens: int) -> int:
        """Return the first page of a table that may still be used when `num_tokens` tokens have KV.

        Counted from the last page boundary instead of the last token, so that a request can always
        continue from that boundary, and a step that runs behind may still read.
        """
        window = self.windows[table]
        if window is None:
            return 0
        edge = num_tokens // self.page_size * self.page_size
        return max(0, edge - window + 1) // self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Return the pages that a request holds when all its tokens have KV."""
        num_pages = self.num_pages(num_tokens)
        live = sum(num_pages - self.live_from(t, num_tokens) for t, _ in self.sliding)
        return self.num_full * num_pages + live + self.state_pages

    def pages_to_compute(self, num_tokens: int) -> int:
        """Return the pages to reserve for a prompt: all of them, freed chunk by chunk."""
        return self.num_pages(num_tokens) * self.num_tables + self.state_pages

    def max_tokens(self, num_pages: int) -> int:
        """Return the length of the longest prompt that `num_pages` pages can compute."""
        return max(0, num_pages - self.state_pages) // self.num_tables * self.page_size

    def most_live(self, table: int) -> float:
        """Return the maximum number of live pages in a table for one growing request."""
        window = self.windows[table]
        return math.inf if window is None else self.num_pages(window - 1) + 2

    def growth(self, num_tokens: int, more_pages: int) -> int:
        """Return the additional pages, over all tables, of a request that grows by `more_pages`.

        All its `num_tokens` tokens have KV. Each full table needs `more_pages`. A table with a
        window needs fewer once the window is full.
        """
        held = self.num_pages(num_tokens)
        return self.num_full * more_pages + sum(
            int(min(more_pages, self.most_live(t) - (held - self.live_from(t, num_tokens))))
            for t, _ in self.sliding
        )

    def handed_over(self, num_tokens: int, prefix: int) -> tuple[PageSpan, ...]:
        """Return the pages to send to a consumer that has `prefix` tokens in its full tables.

        These are the rest of the full tables, the live pages of tables with a window, and the
        state.
        """
        behind, past = self.num_pages(prefix), self.num_pages(num_tokens)
        tables = [
            PageSpan(table, behind if window is None else self.live_from(table, num_tokens), past)
            for table, window in enumerate(self.windows)
        ]
        return (*tables, *self._state)

    def room_pages(self, num_tokens: int, prefix: int) -> int:
        """Return the most pages handed over for any number of tokens up to `num_tokens`."""
        num_pages = self.num_pages(num_tokens)
        behind = self.num_full * (num_pages - self.num_pages(prefix))
        live = sum(int(min(num_pages, self.most_live(t))) for t, _ in self.sliding)
        return behind + live + self.state_pages

    def spans(
        self, num_tokens: int, prefix: int, start: int, end: int, *, last: bool
    ) -> tuple[PageSpan, ...]:
        """Return the pages to hand over with the tokens [start, end).

        Over all ranges from `prefix` on, each page occurs once. The first range includes the pages
        of windows before the prefix. The last range, which may be empty, includes the state.
        """
        past = self.num_pages(end)
        spans = []
        for all_of_it in self.handed_over(num_tokens, prefix)[: self.num_tables]:
            first = all_of_it.first if start == prefix else self.num_pages(start)
            first = max(first, all_of_it.first)
            if first < past:
                spans.append(PageSpan(all_of_it.table, first, past))
        return (*spans, *(self._state if last else ()))

    @cached_property
    def _state(self) -> tuple[PageSpan, ...]:
        return (PageSpan(self.num_tables, 0, self.state_pages),) if self.state_pages else ()


def num_pages_of(spans: tuple[PageSpan, ...]) -> int:
    return sum(past - first for _, first, past in spans)
