"""The pages of one request, as the parts of the engine pass them to each other."""

from collections.abc import Iterable
from typing import Self

import msgspec
import numpy as np

from common.page_tables import PageSpan, PageTables
from engine.batch.batch import Ints

NO_PAGE = -1  # page 0 is valid
_NO_PAGES = np.empty(0, np.int32)
# Arrays, because numpy would convert a Python int in every call, half the time of a short one.
ZERO, ONE = np.array(0, np.int32), np.array(1, np.int32)


class PageHolding(msgspec.Struct, frozen=True, eq=False):
    """A request's pages. Immutable.

    tables: [tables, n]. Row t has the pages of page table t in order, and NO_PAGE for pages that
    left the window and are freed. state: [state pages], the pages of its recurrent state.
    """

    tables: Ints
    state: Ints = _NO_PAGES

    @classmethod
    def of(cls, *tables: Ints) -> Self:
        """Stack one array of pages per page table."""
        return cls(np.stack(tables))

    @classmethod
    def none(cls, num_tables: int) -> Self:
        return cls(np.empty((num_tables, 0), np.int32))

    @classmethod
    def laid_out(cls, tables: PageTables, cached: Ints, fresh: Ints, num_tokens: int) -> Self:
        """Assign pages to `num_tokens` tokens: first `cached` [full tables, n], then `fresh` in
        hand-off order."""
        if not tables.sliding:
            return cls(cached).and_behind(fresh, tables.state_pages)
        num_cached = cached.shape[1]
        pages = np.full((tables.num_tables, tables.num_pages(num_tokens)), NO_PAGE, np.int32)
        pages[: tables.num_full, :num_cached] = cached
        place = 0
        spans = tables.handed_over(num_tokens, num_cached * tables.page_size)
        for table, first, past in spans[: tables.num_tables]:
            pages[table, first:past] = fresh[place : place + past - first]
            place += past - first
        return cls(pages, fresh[place:])

    @property
    def num_pages(self) -> int:
        """Number of pages of each table, including freed ones."""
        num_pages: int = self.tables.shape[1]
        return num_pages

    def flat(self) -> Ints:
        """Return a copy of all present pages, table by table, then the state pages. All are
        distinct."""
        pages = self.tables.ravel()
        present = pages[pages >= ZERO]
        return np.concatenate((present, self.state)) if len(self.state) else present

    def pages_of(self, spans: Iterable[PageSpan]) -> Ints:
        """Return a copy of the pages of these spans, concatenated."""
        pages = [
            self.state[first:past] if table == len(self.tables) else self.tables[table, first:past]
            for table, first, past in spans
        ]
        return np.concatenate(pages) if pages else _NO_PAGES

    def moved_to(self, pages: Ints) -> Self:
        """Return the same holding with other pages, given in the order of `flat`."""
        tables = np.full_like(self.tables, NO_PAGE)
        of_tables = len(pages) - len(self.state)
        tables[self.tables >= 0] = pages[:of_tables]
        return type(self)(tables, pages[of_tables:])

    def and_behind(self, pages: Ints, state_pages: int = 0) -> Self:
        """Append the same number of pages to each table. `pages` lists them table by table. Its
        last `state_pages` entries are for the recurrent state."""
        of_tables = len(pages) - state_pages
        fresh = pages[:of_tables].reshape(len(self.tables), -1)
        return type(self)(np.concatenate((self.tables, fresh), axis=1), pages[of_tables:])
