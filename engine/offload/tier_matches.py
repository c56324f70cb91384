"""Lookup of the part of a prompt that is in the offload tiers and can be loaded."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from common.page_tables import PageSpan, PageTables
from common.requests.namespace import Namespace
from engine.batch.batch import Ints
from engine.batch.holding import NO_PAGE, PageHolding
from engine.kv_cache.radix import PrefixCache
from engine.kv_cache.radix_nodes import PageKey, last_within, page_keys
from engine.offload.file_tier import StoredPage
from engine.offload.tier_index import TierEntry, TierIndex

LEAST_TOKENS = 64  # computing fewer tokens is faster than a load


class TierMatch(NamedTuple):
    """The part of a prompt that can be loaded, at the time of the lookup."""

    token_ids: Ints  # tokens that will have KV
    namespace: Namespace
    prefix: int  # number of whole pages in full tables of the tree
    gained: int  # tokens that do not have to be computed after the load
    key: PageKey  # key of the first loaded page, or of the last page if none is loaded
    kept: Sequence[TierEntry]
    host: Ints  # in the order of PageTables.handed_over, NO_PAGE for pages that only files have
    filed: Sequence[StoredPage]  # the pages that only files have


class _Below(NamedTuple):
    """The loadable pages of one page of tokens."""

    kept: TierEntry | None
    filed: TierEntry | None

    def on_host(self, width: int) -> list[int]:
        """Return the host pages by place."""
        return [NO_PAGE] * width if self.kept is None else self.kept.places

    def anywhere(self, width: int) -> list[int]:
        """Return pages or slots by place. NO_PAGE where neither host memory nor a file has one."""
        if self.filed is None:
            return self.on_host(width)
        pairs = zip(self.on_host(width), self.filed.places, strict=True)
        return [slot if page == NO_PAGE else page for page, slot in pairs]

    def stored(self, key: PageKey, place: int) -> StoredPage:
        """Return a page that only files have."""
        assert self.filed is not None
        return StoredPage(key, self.filed, place)


class TierMatches:
    """Looks up pages in the tiers. Engine thread only."""

    def __init__(
        self, host: TierIndex, files: TierIndex | None, cache: PrefixCache, tables: PageTables
    ) -> None:
        self._host = host
        self._files = files
        self._cache = cache
        self._tables = tables
        self._width = tables.width

    def find(
        self, token_ids: Ints, namespace: Namespace, *, filed: bool = True
    ) -> TierMatch | None:
        """Return the loadable pages for these tokens, or None if a load is not worth it.

        Args:
            filed: whether to include pages in files.
        """
        tables, size = self._tables, self._tables.page_size
        match = self._cache.match(token_ids, namespace)
        prefix = match.shared.shape[1]
        keys, below = self._below(token_ids, namespace, prefix, self._files if filed else None)
        end = self._last_resumable(below)
        gained = end * size - match.num_tokens
        if gained < LEAST_TOKENS:
            return None
        prefix = min(prefix, end)
        pages = np.array([each.on_host(self._width) for each in below[:end]], np.int32).T
        holding = PageHolding(pages[: tables.num_tables], pages[tables.num_tables :, -1])
        spans = tables.handed_over(end * size, prefix * size)
        first = min(span.first if span.table < tables.num_tables else end - 1 for span in spans)
        return TierMatch(
            token_ids[: end * size],
            namespace,
            prefix,
            gained,
            keys[min(prefix, end - 1)],
            [each.kept for each in below[first:end] if each.kept is not None],
            holding.pages_of(spans),
            [below[at].stored(keys[at], place) for place, at in self._lacking(pages, spans)],
        )

    def _below(
        self, token_ids: Ints, namespace: Namespace, prefix: int, files: TierIndex | None
    ) -> tuple[list[PageKey], list[_Below]]:
        """Return the keys of all pages in the tree (full tables) or, without a gap, in the tiers,
        and the tiers' entries of each."""
        keys = self._cache.keys(token_ids, namespace)[:prefix]
        below = [self._below_of(key, files) for key in keys]
        above = keys[-1] if keys else namespace
        rest = token_ids[prefix * self._tables.page_size :]
        for key in page_keys(above, rest, self._tables.page_size):
            each = self._below_of(key, files)
            if NO_PAGE in each.anywhere(self._width)[: self._tables.num_full]:
                break
            keys.append(key)
            below.append(each)
        return keys, below

    def _below_of(self, key: PageKey, files: TierIndex | None) -> _Below:
        kept = self._host.get(key)
        if kept is not None and kept.writes:
            kept = None
        if kept is not None and NO_PAGE not in kept.places:
            return _Below(kept, None)
        filed = None if files is None else files.get(key)
        return _Below(kept, None if filed is None or filed.writes else filed)

    def _lacking(self, pages: Ints, spans: Sequence[PageSpan]) -> Iterator[tuple[int, int]]:
        """Yield (place, page of tokens) for each entry of these spans that `pages` [places, n] of
        host memory lack."""
        num_tables, last = self._tables.num_tables, pages.shape[1] - 1
        for table, first, past in spans:
            if table < num_tables:
                lacking = first + np.flatnonzero(pages[table, first:past] == NO_PAGE)
                yield from ((table, at) for at in lacking.tolist())
            else:
                lacking = num_tables + np.flatnonzero(pages[num_tables:, last] == NO_PAGE)
                yield from ((place, last) for place in lacking.tolist())

    def _last_resumable(self, below: Sequence[_Below]) -> int:
        """Return the largest number of these pages after which a request can continue. Only pages
        of full tables may come from the tree."""
        tables, end = self._tables, len(below)
        if not end or not (tables.sliding or tables.state_pages):
            return end
        pages = np.array([each.anywhere(self._width) for each in below], np.int32).T
        while end:
            if tables.state_pages:
                whole = (pages[tables.num_tables :, :end] >= 0).all(axis=0)
                end = int(np.flatnonzero(whole)[-1]) + 1 if whole.any() else 0
            within = last_within(tables, pages[: tables.num_tables, :end])
            if within == end:
                break
            end = within
        return end
