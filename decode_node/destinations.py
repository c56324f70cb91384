"""Where the KV of a hand-off lands: fresh pages behind those that the prefix cache has already.

A hand-off has two holds on the fresh ones. The request's goes with the request, wherever that goes;
that of the reads stays until no byte can land there any more, whatever has become of the request.
"""

from typing import NamedTuple

import numpy as np

from common.engine.memory.pages import Holder, PageAllocator
from common.engine.memory.radix import RadixCache
from common.engine.rows.request import Ints, Request
from common.engine.schedule.scheduler import Scheduler
from kvtransfer.messages import HandoffId


class Destination(NamedTuple):
    """Pages of all tokens of a request, in order, held for it.

    Attributes:
        prefix_tokens: whole pages of them are here already.
        fresh: the pages after those, held for the reads too.
    """

    pages: Ints
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
        page_size: int,
        page_bytes: int,
    ) -> None:
        self._scheduler = scheduler
        self._pages = pages
        self._cache = cache
        self.page_size = page_size
        self.page_bytes = page_bytes
        self.reads: dict[HandoffId, Ints] = {}

    def reserve(self, handoff_id: HandoffId, request: Request) -> Destination | None:
        """All or nothing. None although there seemed to be room: what looked evictable hangs below
        something held."""
        token_ids = request.token_ids
        prefix = self._cache.match(token_ids, request.namespace)
        self._pages.hold(prefix.pages, Holder.REQUEST)
        num_pages = -(-len(token_ids) // self.page_size)
        fresh = self._scheduler.allocate(num_pages - len(prefix.pages), Holder.REQUEST)
        if fresh is None:
            self._pages.drop(prefix.pages, Holder.REQUEST)
            return None
        self._pages.hold(fresh, Holder.READ)
        self.reads[handoff_id] = fresh
        return Destination(np.concatenate([prefix.pages, fresh]), prefix.num_tokens, fresh)

    def drop(self, destination: Destination) -> None:
        """The request does not want them any more; reads may go on."""
        self._pages.drop(destination.pages, Holder.REQUEST)

    def reads_ended(self, handoff_id: HandoffId) -> None:
        self._pages.drop(self.reads.pop(handoff_id), Holder.READ)
