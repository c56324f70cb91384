"""The core of an engine: slots, pages, prefix cache and offload tiers. It needs no torch and no
model.

A scheduler works on a core. Tests and benchmarks also create their cores here.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol, Self

from common.config import EngineConfig
from common.page_tables import PageTables
from common.requests.images import Image
from engine.batch.batch import Ints
from engine.batch.limits import RequestLimits
from engine.batch.table import SlotTable
from engine.kv_cache.pages import AscendingRuns, FreeList, PageAllocator, PageHolder
from engine.kv_cache.radix import PrefixCache
from engine.offload.cache_tiers import CacheTiers
from engine.offload.file_tier import PageStore
from engine.offload.saves import TierCopier
from engine.speculative import Speculator


@dataclass(frozen=True, slots=True)
class CoreShape:
    """The sizes of an engine's core.

    Attributes:
        context_length: maximum tokens of a request.
        tier_pages: host pages for pages that the prefix cache evicts.
        chunk_tokens: maximum tokens of a chunk, page aligned. None: prompts are not split.
    """

    tables: PageTables
    context_length: int
    num_pages: int
    host_pages: int = 0
    tier_pages: int = 0
    chunk_tokens: int | None = None

    @property
    def num_host_pages(self) -> int:
        return self.host_pages + self.tier_pages


class EncodingJob(Protocol):
    """Images of one request that are being encoded."""

    cancelled: bool  # set by the engine thread if no request needs them any more

    @property
    def done(self) -> bool: ...


class InputEncoder(Protocol):
    """Encodes images concurrently with the steps of the engine.

    Attributes:
        notify: called from any thread whenever images are encoded.
        batches: number of calls of the encoder so far.
        num_waiting: number of queued images.
        token_bytes: bytes of an image token's embedding.
    """

    notify: Callable[[], None]
    batches: int
    token_bytes: int

    @property
    def num_waiting(self) -> int: ...

    def begin(self, images: Sequence[Image]) -> EncodingJob | None:
        """Encode images that are not cached. Return None if the queue is full."""
        ...

    def missing(self, images: Sequence[Image]) -> Sequence[Image]:
        """Return the images whose embeddings are not cached, without duplicates."""
        ...

    @property
    def epoch(self) -> int:
        """Return a number that changes with the weights."""
        ...

    def copy(self, image: Image, pages: Ints, piece_bytes: int, epoch: int) -> Future[None]:
        """Cache the embeddings whose parts are in these pages of the engine's pool.

        The pages must not change until the copy is done. Embeddings of an older epoch are dropped.
        """
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class EngineCore:
    """The state on which a scheduler works.

    Attributes:
        host_pages: pages of host memory, for retracted requests and offload tiers.
        tiers: None: there are no offload tiers.
        speculator: proposes drafts. None: no speculative decoding.
        clock: returns seconds, on the time scale of requests.
        encoder: None: the model has no image input.
    """

    shape: CoreShape
    limits: RequestLimits
    table: SlotTable
    pages: PageAllocator
    cache: PrefixCache
    host_pages: PageAllocator
    tiers: CacheTiers | None = None
    speculator: Speculator | None = None
    clock: Callable[[], float] = time.monotonic
    encoder: InputEncoder | None = None

    @classmethod
    def make(
        cls,
        config: EngineConfig,
        shape: CoreShape,
        limits: RequestLimits,
        copier: TierCopier | None = None,
        *,
        store: PageStore | None = None,
        speculator: Speculator | None = None,
        free_list: Callable[[int], FreeList] = AscendingRuns,
        clock: Callable[[], float] = time.monotonic,
    ) -> Self:
        """Create an empty core.

        Args:
            copier: copies pages to host memory and back. None: there are no offload tiers.
            store: files of the file tier.
            free_list: see PageAllocator.
        """
        tables = shape.tables
        kept = tables.windows, tables.state_pages
        table = SlotTable(
            config.scheduler.num_slots,
            shape.context_length,
            tables.page_size,
            *kept,
            0 if speculator is None else speculator.max_drafts,
        )
        pages = PageAllocator(shape.num_pages, free_list)
        enabled = config.cache.prefix_cache
        most = config.cache.max_cached_pages
        cache = PrefixCache(tables.page_size, pages, *kept, enabled=enabled, max_pages=most)
        host_pages, tiers = PageAllocator(shape.num_host_pages), None
        if shape.tier_pages and enabled and copier is not None:
            tiers = CacheTiers(host_pages, cache, pages, tables, copier, store)
        return cls(shape, limits, table, pages, cache, host_pages, tiers, speculator, clock)

    def with_host_pages(self, shape: CoreShape) -> Self:
        """Return this core with new host pages for retracted requests. There must be no offload
        tiers, and no request on the device."""
        return replace(self, shape=shape, host_pages=PageAllocator(shape.num_host_pages))

    def allocate_host(self, num_pages: int, holder: PageHolder) -> Ints | None:
        """Allocate host pages, evicting from the offload tier if needed. All or nothing."""
        host = self.host_pages if self.tiers is None else self.tiers.host
        return host.allocate(num_pages, holder)
