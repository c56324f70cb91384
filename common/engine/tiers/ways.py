"""What of a prompt is in the tier below the prefix tree, and can be gone on from."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from common.engine.memory.page_keys import PageKey, page_keys
from common.engine.memory.radix import RadixCache
from common.engine.memory.radix_windows import last_within
from common.engine.rows.batch import Ints
from common.engine.rows.holding import NO_PAGE, Holding
from common.engine.tiers.host_cache import HostCache, HostPages
from common.page_tables import PageTables
from common.requests.namespace import Namespace

LEAST_TOKENS = 64  # fewer are computed sooner than a prompt has waited for them


class Way(NamedTuple):
    """What can be brought of a prompt, as things are now."""

    token_ids: Ints  # of which there will be KV
    namespace: Namespace
    prefix: int  # whole pages that full tables have of it
    gained: int  # tokens that one need not compute then
    key: PageKey  # of the first page that is brought, or the last
    kept: Sequence[HostPages]
    host: Ints  # as PageTables.handed_over has them


class Ways:
    """Engine thread only."""

    def __init__(self, host: HostCache, cache: RadixCache, tables: PageTables) -> None:
        self._host = host
        self._cache = cache
        self._tables = tables
        self._width = tables.num_tables + tables.state_pages

    def find(self, token_ids: Ints, namespace: Namespace) -> Way | None:
        """None: there is nothing below of these tokens that is worth it."""
        tables, size = self._tables, self._tables.page_size
        match = self._cache.match(token_ids, namespace)
        prefix = match.shared.shape[1]
        keys, kept = self._below(token_ids, namespace, prefix)
        end = self._last_resumable(kept)
        gained = end * size - match.num_tokens
        if gained < LEAST_TOKENS:
            return None
        prefix = min(prefix, end)
        pages = np.array([self._pages_of(each) for each in kept[:end]], np.int32).T
        holding = Holding(pages[: tables.num_tables], pages[tables.num_tables :, -1])
        spans = tables.handed_over(end * size, prefix * size)
        first = min(span.first if span.table < tables.num_tables else end - 1 for span in spans)
        return Way(
            token_ids[: end * size],
            namespace,
            prefix,
            gained,
            keys[min(prefix, end - 1)],
            [each for each in kept[first:end] if each is not None],
            holding.take(spans),
        )

    def _below(
        self, token_ids: Ints, namespace: Namespace, prefix: int
    ) -> tuple[list[PageKey], list[HostPages | None]]:
        """Keys of as many pages as full tables have in the tree, or below without a gap; and what
        is below of each of them."""
        keys = self._cache.keys(token_ids, namespace)[:prefix]
        kept = [self._landed_of(key) for key in keys]
        above = keys[-1] if keys else namespace
        rest = token_ids[prefix * self._tables.page_size :]
        for key in page_keys(above, rest, self._tables.page_size):
            each = self._landed_of(key)
            if each is None or NO_PAGE in each.pages[: self._tables.num_full]:
                break
            keys.append(key)
            kept.append(each)
        return keys, kept

    def _landed_of(self, key: PageKey) -> HostPages | None:
        kept = self._host.get(key)
        return kept if kept is not None and not kept.saves else None

    def _pages_of(self, kept: HostPages | None) -> list[int]:
        if kept is not None:
            return kept.pages
        return [NO_PAGE] * self._width

    def _last_resumable(self, kept: Sequence[HostPages | None]) -> int:
        """After how many of these pages one can go on from what is below alone, but for full
        tables."""
        tables, end = self._tables, len(kept)
        if not end or not (tables.sliding or tables.state_pages):
            return end
        pages = np.array([self._pages_of(each) for each in kept], np.int32).T
        while end:
            if tables.state_pages:
                whole = (pages[tables.num_tables :, :end] >= 0).all(axis=0)
                end = int(np.flatnonzero(whole)[-1]) + 1 if whole.any() else 0
            within = last_within(tables, pages[: tables.num_tables, :end])
            if within == end:
                break
            end = within
        return end
