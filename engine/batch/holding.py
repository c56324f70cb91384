"""The pages of one request, as they cross from one part of the engine to another."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from common.page_tables import PageTables, Span
from engine.batch.batch import Ints

NO_PAGE = -1  # page 0 is a page
_NO_STATE = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Holding:
    """tables [tables, n]: row t has the pages of table t in order; NO_PAGE where it has none any
    more, behind a window. state [state pages]: those of its state. Nobody changes it."""

    tables: Ints
    state: Ints = field(default_factory=lambda: _NO_STATE)

    @classmethod
    def of(cls, *tables: Ints) -> Self:
        """Of tables one by one."""
        return cls(np.stack(tables))

    @classmethod
    def none(cls, num_tables: int) -> Self:
        return cls(np.empty((num_tables, 0), np.int32))

    @classmethod
    def laid_out(cls, tables: PageTables, cached: Ints, fresh: Ints, num_tokens: int) -> Self:
        """Of so many tokens: `cached` [full tables, n], then `fresh` as it is handed over."""
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
        """Of each table, freed ones too."""
        num_pages: int = self.tables.shape[1]
        return num_pages

    def flat(self) -> Ints:
        """Those that there are, table after table, then the state; distinct. A copy."""
        pages = self.tables.ravel()
        return np.concatenate((pages[pages >= 0], self.state))

    def take(self, spans: Iterable[Span]) -> Ints:
        """The pages of these spans, one after the other. A copy."""
        pages = [
            self.state[first:past] if table == len(self.tables) else self.tables[table, first:past]
            for table, first, past in spans
        ]
        return np.concatenate([*pages, np.empty(0, np.int32)])

    def moved_to(self, pages: Ints) -> Self:
        """The same with other pages, in the order of `flat`."""
        tables = np.full_like(self.tables, NO_PAGE)
        of_tables = len(pages) - len(self.state)
        tables[self.tables >= 0] = pages[:of_tables]
        return type(self)(tables, pages[of_tables:])

    def and_behind(self, pages: Ints, state_pages: int = 0) -> Self:
        """With as many more pages in each table: `pages` is one table's after the other's, and the
        last `state_pages` of them are its state."""
        of_tables = len(pages) - state_pages
        fresh = pages[:of_tables].reshape(len(self.tables), -1)
        return type(self)(np.concatenate((self.tables, fresh), axis=1), pages[of_tables:])
