"""Where the KV of a hand-off lands: fresh pages behind those that the prefix cache has already, and
for all that windows see at the prompt's end.

A hand-off has two holds on the fresh ones. The request's goes with the request, wherever that goes;
that of the reads stays until no byte can land there any more, whatever has become of the request.
"""

from typing import NamedTuple

import numpy as np

from common.page_tables import PageTables, num_pages_of
from common.requests.namespace import Namespace
from engine.batch.holding import Holding
from engine.batch.request import Ints
from engine.kv_cache.pages import Holder, PageAllocator
from engine.kv_cache.radix import RadixCache
from engine.offload.tiers import Tiers
from engine.scheduler.scheduler import Scheduler
from kvtransfer.messages import HandoffId


class Destination(NamedTuple):
    """Pages of all tokens of a request, held for it.

    Attributes:
        holding: of one that moves here, until it is known how many tokens it has, all pages that
            are held for it, in one table.
        prefix_tokens: whole pages of them are here already, of full tables.
        fresh: the other pages, held for the reads too, as GrantHandoff has them.
    """

    holding: Holding
    prefix_tokens: int
    fresh: Ints


class Destinations:
    """Engine thread only.

    Attributes:
        reads: pages held until nothing can land in them.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        pages: PageAllocator,
        cache: RadixCache,
        tables: PageTables,
        tiers: Tiers,
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
    ) -> Destination | None:
        """All or nothing. None although there seemed to be room: what looked evictable hangs below
        something held.

        Args:
            room_tokens: of a request that moves here: so many are to fit.
        """
        num_tokens = len(token_ids)
        cached = self._cache.match(token_ids, namespace).shared
        prefix_tokens = cached.shape[1] * self.tables.page_size
        if room_tokens:
            num_pages = self.tables.room_pages(room_tokens, prefix_tokens)
        else:
            num_pages = num_pages_of(self.tables.handed_over(num_tokens, prefix_tokens))
        self._pages.hold(cached.ravel(), Holder.REQUEST)
        fresh = self._scheduler.allocate(num_pages, Holder.REQUEST)
        if fresh is None:
            self._pages.drop(cached.ravel(), Holder.REQUEST)
            return None
        self._tiers.used(token_ids[:prefix_tokens], namespace)
        self._pages.hold(fresh, Holder.READ)
        self.reads[handoff_id] = fresh
        if room_tokens:
            holding = Holding.of(np.concatenate((cached.ravel(), fresh)))
        else:
            holding = Holding.laid_out(self.tables, cached, fresh, num_tokens)
        return Destination(holding, prefix_tokens, fresh)

    def lacks_pages(self, token_ids: Ints, destination: Destination) -> bool:
        """Whether whole pages of them are going to be read that the cache will have then."""
        whole = len(token_ids) - len(token_ids) % self.tables.page_size
        return self._cache.enabled and destination.prefix_tokens < whole

    def settle(self, destination: Destination, num_tokens: int) -> Destination:
        """Of a request that moves here: now it is known to have KV of so many tokens. What is too
        much goes back, as soon as no read can land there."""
        tables, prefix = self.tables, destination.prefix_tokens
        cached = destination.holding.flat()[: -len(destination.fresh) or None]
        cached = cached.reshape(tables.num_full, tables.num_pages(prefix))
        num_pages = num_pages_of(tables.handed_over(num_tokens, prefix))
        fresh, surplus = np.split(destination.fresh, [num_pages])
        self._pages.drop(surplus, Holder.REQUEST)
        holding = Holding.laid_out(tables, cached, fresh, num_tokens)
        return Destination(holding, prefix, fresh)

    def drop(self, destination: Destination) -> None:
        """The request does not want them any more; reads may go on."""
        self._pages.drop(destination.holding.flat(), Holder.REQUEST)

    def reads_ended(self, handoff_id: HandoffId) -> None:
        self._pages.drop(self.reads.pop(handoff_id), Holder.READ)
