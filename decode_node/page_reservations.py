"""Pages for the KV of a hand-off: after the cached prefix, and in windows at the prompt's end.

A hand-off holds the fresh pages twice. The request's hold follows the request. The hold of the
reads remains until no more bytes can land in the pages, whatever happens to the request.
"""

from typing import NamedTuple

import numpy as np

from common.page_tables import PageTables, num_pages_of
from common.requests.namespace import Namespace
from engine.batch.holding import PageHolding
from engine.batch.request import Ints
from engine.kv_cache.pages import PageAllocator, PageHolder
from engine.kv_cache.radix import PrefixCache
from engine.offload.cache_tiers import CacheTiers
from engine.scheduler.scheduler import Scheduler
from kvtransfer.messages import HandoffId


class PageReservation(NamedTuple):
    """Pages of all tokens of a request, held for it.

    Attributes:
        holding: the pages. For a migration, one table with all pages until its number of tokens is
            known.
        prefix_tokens: tokens in whole pages that are cached here already, of full tables.
        fresh: the other pages, also held for the reads, in the order of GrantCommand.
    """

    holding: PageHolding
    prefix_tokens: int
    fresh: Ints


class PageReservations:
    """Reservations of pages for incoming hand-offs. Engine thread only.

    Attributes:
        reads: pages held until no more bytes can land in them.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        pages: PageAllocator,
        cache: PrefixCache,
        tables: PageTables,
        tiers: CacheTiers,
        page_bytes: int,
    ) -> None:
        self._scheduler = scheduler
        self._pages = pages
        self._cache = cache
        self._tiers = tiers
        self.tables = tables
        self.page_bytes = page_bytes
        self.reads: dict[HandoffId, Ints] = {}

    def reserve(
        self, handoff_id: HandoffId, token_ids: Ints, namespace: Namespace, room_tokens: int = 0
    ) -> PageReservation | None:
        """Reserve pages for all tokens, or none.

        Returns None if pages are short, although they seemed to suffice: an evictable-looking page
        may be the parent of a held one.

        Args:
            room_tokens: number of tokens to fit, for a migration. 0: not a migration.
        """
        num_tokens = len(token_ids)
        cached = self._cache.match(token_ids, namespace).shared
        prefix_tokens = cached.shape[1] * self.tables.page_size
        if room_tokens:
            num_pages = self.tables.room_pages(room_tokens, prefix_tokens)
        else:
            num_pages = num_pages_of(self.tables.handed_over(num_tokens, prefix_tokens))
        self._pages.hold(cached.ravel(), PageHolder.REQUEST)
        fresh = self._scheduler.allocate(num_pages, PageHolder.REQUEST)
        if fresh is None:
            self._pages.drop(cached.ravel(), PageHolder.REQUEST)
            return None
        self._tiers.used(token_ids[:prefix_tokens], namespace)
        self._pages.hold(fresh, PageHolder.READ)
        self.reads[handoff_id] = fresh
        if room_tokens:
            holding = PageHolding.of(np.concatenate((cached.ravel(), fresh)))
        else:
            holding = PageHolding.laid_out(self.tables, cached, fresh, num_tokens)
        return PageReservation(holding, prefix_tokens, fresh)

    def lacks_pages(self, token_ids: Ints, destination: PageReservation) -> bool:
        """Return whether the reads will bring whole pages into the cache that it lacks now."""
        whole = len(token_ids) - len(token_ids) % self.tables.page_size
        return self._cache.enabled and destination.prefix_tokens < whole

    def settle(self, destination: PageReservation, num_tokens: int) -> PageReservation:
        """Adjust the reservation of a migration once its number of tokens with KV is known.

        Surplus pages become free as soon as no read can land in them.
        """
        tables, prefix = self.tables, destination.prefix_tokens
        cached = destination.holding.flat()[: -len(destination.fresh) or None]
        cached = cached.reshape(tables.num_full, tables.num_pages(prefix))
        num_pages = num_pages_of(tables.handed_over(num_tokens, prefix))
        fresh, surplus = np.split(destination.fresh, [num_pages])
        self._pages.drop(surplus, PageHolder.REQUEST)
        holding = PageHolding.laid_out(tables, cached, fresh, num_tokens)
        return PageReservation(holding, prefix, fresh)

    def drop(self, destination: PageReservation) -> None:
        """Release the request's hold on the pages. Reads may continue."""
        self._pages.drop(destination.holding.flat(), PageHolder.REQUEST)

    def reads_ended(self, handoff_id: HandoffId) -> None:
        self._pages.drop(self.reads.pop(handoff_id), PageHolder.READ)
