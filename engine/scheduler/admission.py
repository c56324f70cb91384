"""Admission of waiting requests to the rows of a prefill forward (chunked prefill).

Admission is all or nothing. An admitted request holds its cached prefix, the pages of its whole
prompt, and a slot. Its prompt is then computed in one or more chunks, one chunk per forward. At
most one prompt is partly computed at a time, and its next chunk goes first. Smaller requests may
overtake a request that does not fit, until that request has waited too long (arrivals.py). If an
offload tier has more of a request's prefix, the request waits once for that load, when there is
capacity for it.

PrefillAdder keeps the budgets of a forward: pages (free and evictable, minus the expected growth of
running requests), prompt tokens, and tokens of the chunk.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from common.config import SchedulerConfig
from engine.batch.batch import Ints
from engine.batch.holding import PageHolding
from engine.batch.image_tokens import end_outside
from engine.batch.request import Request
from engine.core import EngineCore
from engine.kv_cache.pages import PageHolder
from engine.kv_cache.radix import PrefixMatch
from engine.kv_cache.radix_nodes import NO_STATE, stretch
from engine.scheduler.arrivals import (
    ActivePrefills,
    KeptCapacity,
    PageDemand,
    SchedulePolicy,
    WaitingQueue,
    is_overdue,
)
from engine.scheduler.retraction import RetractedRequests
from engine.scheduler.running import NewTokenRatio, missing_pages_of_one

# With more decode rows than this, chunks are small, because all these rows wait for the chunk.
MANY_DECODE_ROWS = 10
SMALL_CHUNK_TOKENS = 512


class PrefillAdder:
    """The budgets of one prefill batch. Each reservation reduces them.

    Args:
        reserved_pages: pages kept free for the growth of other requests.
        input_tokens: limit of prompt tokens, which the first row may exceed.
        chunk_tokens: limit of all tokens. None: prompts are not split into chunks.
        max_requests: limit of rows. 0: no limit.
    """

    def __init__(
        self,
        *,
        page_size: int,
        reserved_pages: int,
        input_tokens: int,
        chunk_tokens: int | None,
        max_requests: int = 0,
    ) -> None:
        self._page_size = page_size
        self._reserved_pages = reserved_pages
        self._input_left = input_tokens
        self._chunk_left = chunk_tokens
        self._max_requests = max_requests
        self._num_requests = 0

    def has_room(self, num_pages: float, available: int) -> bool:
        """Return whether `available` pages suffice for a request that may need up to
        `num_pages`."""
        return num_pages <= available - self._reserved_pages

    def reserve(self, num_pages: int) -> None:
        """Keep this many more pages free for the growth of an admitted request."""
        self._reserved_pages += num_pages

    def cut(self, start: int, end: int) -> int:
        """Take as many of the tokens [start, end) as fit in the budgets. `start` is page aligned.

        Returns:
            The token index at which this forward stops: `end`, or a page boundary before it, or
                `start` if the budgets are used up. The first row of a batch gets at least one page.
        """
        num_tokens, empty = end - start, not self._num_requests
        if self._chunk_left is not None and num_tokens > self._chunk_left:
            num_tokens = self._chunk_left // self._page_size * self._page_size
            if empty:
                num_tokens = min(end - start, max(num_tokens, self._page_size))
        used_up = num_tokens > self._input_left or self._num_requests == self._max_requests
        if num_tokens <= 0 or (used_up and not empty):
            return start
        self._num_requests += 1
        self._input_left -= num_tokens
        if self._chunk_left is not None:
            self._chunk_left -= num_tokens
        return start + num_tokens


class ExtendRow(msgspec.Struct, frozen=True, eq=False):
    """A prompt row: the token indices [start, end) of a request that one forward computes.

    Attributes:
        last: whether the prompt ends at `end`.
        resumed: pages of the recurrent state from which the row continues, if any.
        kept: pages for a copy of the state after token `keep`, which the prefix cache will store.
        branch: see ChunkRange.
    """

    request: Request
    slot: int
    start: int
    end: int
    last: bool
    resumed: Ints
    kept: Ints
    keep: int
    branch: int

    @property
    def states(self) -> tuple[Ints, ...]:
        """State pages that the step holds."""
        return tuple(pages for pages in (self.resumed, self.kept) if len(pages))

    @property
    def samples(self) -> bool:
        """Return whether a token is sampled after this row."""
        return self.last and self.request.pooling is None


@dataclass(frozen=True, slots=True)
class _Full:
    """The result of a failed admission pass: no request fits with fewer than `num_pages` free
    pages."""

    # Inputs of the pass: queue changes, cached pages, barrier, min_priority.
    of: tuple[int, int, float, float]
    num_pages: float


class PrefillAdmission:
    """The waiting queue, and the prompt of which only some chunks are computed. Engine thread only.

    Attributes:
        max_chunk_tokens: additional limit of the tokens of a chunk.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        core: EngineCore,
        retracted: RetractedRequests,
        ratio: NewTokenRatio,
        kept: KeptCapacity,
        on_admit: Callable[[Request, PageHolding], None],
    ) -> None:
        table, cache = core.table, core.cache
        self._eos_token_ids = core.limits.eos_token_ids
        self._table = table
        self._tables = table.tables
        self._pages = core.pages
        self._cache = cache
        self._tiers = core.tiers
        self._encoder = core.encoder
        # The newest token needs no page, because it has no KV.
        self._max_length = min(
            table.context_length, self._tables.max_tokens(core.pages.num_pages) + 1
        )
        self._whole_images = core.limits.whole_images
        self._clock = core.clock
        self._retracted = retracted
        self._ratio = ratio
        self._kept = kept
        self._on_admit = on_admit
        self._most_on_device = table.num_slots - config.spare_slots
        self._max_prefill_tokens = config.max_prefill_tokens
        self._max_prefill_requests = config.max_prefill_requests
        self._chunk_tokens = core.shape.chunk_tokens
        self._chosen_by_load = config.chunked_prefill_tokens == 0
        self._full: dict[bool, _Full] = {}  # key: whether the pass tried quarantined requests
        policy = SchedulePolicy(config.policy, cache, table.routing_keys, core.clock)
        self.waiting = WaitingQueue(policy)
        self.under_way = ActivePrefills(table.page_size, states=self._tables.state_pages > 0)
        self.chunked: ExtendRow | None = None  # the last launched chunk of an unfinished prompt
        self.max_chunk_tokens = math.inf
        self.cached_tokens = 0
        self.admitted_tokens = 0

    def max_length(self, request: Request) -> int:
        """Return the maximum tokens of the request, which the context length and the page pool
        limit."""
        return min(request.num_prompt + request.sampling.max_tokens, self._max_length)

    def growth_pages(self, request: Request) -> int:
        """Return the pages to keep free for the growth of a request. The request has pages for its
        tokens and for the next token."""
        num_tokens, size = len(request.token_ids), self._table.page_size
        missing = missing_pages_of_one(
            num_tokens + 1,
            self.max_length(request),
            self._tables.num_pages(num_tokens) * size,
            self._ratio.value,
            size,
        )
        return self._tables.growth(num_tokens, missing)

    def take_slot(self, request: Request, holding: PageHolding) -> int | None:
        """Put a request and its pages into the slot table. Return None if no slot is free."""
        slot = self._table.acquire(request, self._eos_token_ids)
        if slot is not None:
            self._table.max_length[slot] = self.max_length(request)
            self._table.set_pages(slot, holding)
        return slot

    def next_rows(
        self,
        *,
        reserved_pages: int,
        num_decode_rows: int,
        min_priority: float,
        device_empty: bool,
        quarantined: bool,
    ) -> list[ExtendRow]:
        """Return the prefill rows of the next forward, or an empty list if no prompt can be
        computed.

        Call it only if a prompt is partly computed, or if `has_slot`.

        Args:
            reserved_pages: pages kept free for the growth of running requests.
            num_decode_rows: decode rows of the same forward. Their tokens count against the chunk's
                budget.
            min_priority: minimum priority that is admitted.
            device_empty: whether no request is on the device. Then any request that fits at all is
                admitted.
            quarantined: True: admit only requests that must be computed alone. False: admit only
                the others.
        """
        adder = PrefillAdder(
            page_size=self._table.page_size,
            reserved_pages=reserved_pages,
            input_tokens=self._max_prefill_tokens,
            chunk_tokens=self._chunk_beside(num_decode_rows),
            max_requests=self._max_prefill_requests,
        )
        adder.reserve(self.growth_of_chunked)
        rows: list[ExtendRow] = []
        chunked = self.chunked
        if chunked is not None and chunked.request.to_finish is None:
            if chunked.request.quarantined is quarantined:
                rows.append(self._next_chunk(chunked, adder))
            if quarantined:
                return rows
        if self.chunked is not None or (rows and not self.has_slot(min_priority)):
            return rows
        if device_empty or not self._is_full(adder, min_priority, quarantined):
            self._admit(adder, rows, min_priority, device_empty, quarantined)
        return rows

    def has_slot(self, min_priority: float = -math.inf) -> bool:
        """Return whether a waiting request of at least this priority could get a slot."""
        if not self.waiting or self.waiting.highest_priority < min_priority:
            return False
        return self.num_free_slots > 0

    @property
    def num_free_slots(self) -> int:
        """Number of slots available to new requests."""
        return min(self._table.num_free - self._kept.slots, self.num_more_on_device)

    @property
    def num_more_on_device(self) -> int:
        """Number of further requests that may run or be prefilled. Swapped-out requests keep their
        slots, but do not count against this limit."""
        on_device = self._table.num_live - self._retracted.num_away
        return self._most_on_device - on_device - self._kept.slots

    def needed_pages(self, request: Request) -> int:
        """Return the pages that the request would need now, including pages kept free for its
        growth."""
        match = self._match(request)
        return self._needed_pages(request, match) + self.growth_pages(request)

    @property
    def first_demand(self) -> PageDemand | None:
        """The pages and the slot that the first waiting request may need at most."""
        first = next(iter(self.waiting), None)
        if first is None:
            return None
        num_pages = self._tables.pages_to_compute(len(first.token_ids))
        return PageDemand(first.arrived, num_pages + self.growth_pages(first), first.spec.priority)

    @property
    def quarantined_waits(self) -> bool:
        """Return whether a quarantined request could be among the next rows."""
        if self.chunked is not None:
            return self.chunked.request.quarantined
        return self.waiting.has_quarantined

    @property
    def growth_of_chunked(self) -> int:
        """Pages to keep free for the growth of the partly computed prompt, which is not running
        yet."""
        return 0 if self.chunked is None else self.growth_pages(self.chunked.request)

    def computed(self, row: ExtendRow) -> None:
        """Record that the forward of this row is done."""
        self.under_way.computed(row.request, row.end - row.start)

    def forget(self, request: Request) -> None:
        """Remove a request that ended or was retracted before its prompt was computed."""
        self.under_way.remove(request)
        if self.chunked is not None and self.chunked.request is request:
            self.chunked = None

    def _chunk_beside(self, num_decode_rows: int) -> int | None:
        """Return the prompt tokens that may share a forward with these decode rows. None: no
        limit."""
        if self._chunk_tokens is None:
            return None
        num_tokens = int(min(self._chunk_tokens, self.max_chunk_tokens))
        num_tokens = max(num_tokens - num_decode_rows, 0)
        if self._chosen_by_load and num_decode_rows > MANY_DECODE_ROWS:
            return min(num_tokens, SMALL_CHUNK_TOKENS)
        return num_tokens

    def _next_chunk(self, before: ExtendRow, adder: PrefillAdder) -> ExtendRow:
        num_tokens = len(before.request.token_ids)
        end = adder.cut(before.end, num_tokens)
        end = self._outside_images(before.request, before.end, end)
        return self._row(before.request, before.slot, before.end, end, adder, before.branch)

    def _row(
        self,
        request: Request,
        slot: int,
        start: int,
        end: int,
        adder: PrefillAdder,
        branch: int,
        resumed: Ints = NO_STATE,
    ) -> ExtendRow:
        num_tokens, kept, keep = len(request.token_ids), NO_STATE, 0
        if self._tables.state_pages and self._cache.enabled:
            size = self._table.page_size
            end, keep = stretch(start, end, num_tokens=num_tokens, branch=branch, page_size=size)
            if keep:
                kept = self._room_for_state(adder)
        last = end == num_tokens
        row = ExtendRow(request, slot, start, end, last, resumed, kept, keep, branch)
        self.chunked = None if last else row
        return row

    def _room_for_state(self, adder: PrefillAdder) -> Ints:
        """Return pages to keep a copy of the state, or none if admission may need them. Keeping is
        optional."""
        num_pages = self._tables.state_pages
        if not adder.has_room(num_pages, self._cache.num_available):
            return NO_STATE
        pages = self._cache.allocate(num_pages, PageHolder.STEP)
        return NO_STATE if pages is None else pages

    def _is_full(self, adder: PrefillAdder, min_priority: float, quarantined: bool) -> bool:
        """Return whether the last admission pass failed and nothing has changed since, so that no
        request fits."""
        full = self._full.get(quarantined)
        if full is None or full.of != self._tried(min_priority):
            return False
        return not adder.has_room(full.num_pages, self._cache.num_available)

    def _tried(self, min_priority: float) -> tuple[int, int, float, float]:
        barrier = self._kept.barrier
        return self.waiting.num_changes, self._cache.num_pages, barrier, min_priority

    def _admit(
        self,
        adder: PrefillAdder,
        rows: list[ExtendRow],
        min_priority: float,
        device_empty: bool,
        quarantined: bool,
    ) -> None:
        """Add rows while the budgets last. At most one of them is a quarantined request."""
        self._full.pop(quarantined, None)
        now, least = self._clock(), math.inf
        held_back = False
        for request in self.waiting.in_order():
            returned = self.waiting.was_returned(request)
            behind = request.queue_position > self._kept.barrier and not returned
            if behind or request.spec.priority < min_priority:
                continue
            if request.quarantined is not quarantined:  # it is computed in another step
                if is_overdue(request.arrived, now):
                    break
                continue
            match = self._match(request)
            if self._cache.enabled and self.under_way.worth_waiting(
                request.reusable_tokens, request.namespace, match.num_tokens
            ):
                held_back = True
                continue
            growth = self.growth_pages(request)
            needed = self._needed_pages(request, match)
            if rows or not device_empty:
                needed += growth
            if not adder.has_room(needed, self._cache.num_available):
                least = min(least, needed)
                if returned or is_overdue(request.arrived, now):
                    break
                continue
            if self._is_coming(request) or self._is_encoding(request, match.num_tokens):
                held_back = True
                continue
            end = adder.cut(match.num_tokens, len(request.token_ids))
            end = self._outside_images(request, match.num_tokens, end)
            if end == match.num_tokens:
                # The forward has no token budget left, but there may be pages: retry in the next
                # step.
                return
            adder.reserve(growth)
            rows.append(self._reserve(request, match, end, adder))
            if self.chunked is not None or quarantined or not self.has_slot():
                return
        if not held_back:
            self._full[quarantined] = _Full(self._tried(min_priority), least)

    def _is_coming(self, request: Request) -> bool:
        """Return whether an offload tier is loading more of this request's prefix. Start the load
        if there is capacity."""
        if self._tiers is None:
            return False

        def over() -> None:
            request.loaded = True
            request.note_loaded(self._clock())

        if request.loaded is None:
            wanted = request.reusable_tokens, request.namespace
            if self._tiers.load(*wanted, self._cache.num_available, over):
                request.loaded = False
                request.loads.append(self._clock())
        return request.loaded is False

    def _outside_images(self, request: Request, start: int, end: int) -> int:
        """Return the end of a chunk, moved out of images whose tokens attend to the whole image.
        May exceed the budgets."""
        images = request.spec.images
        if not self._whole_images or not images or end == start:
            return end
        return end_outside(images, start, end, len(request.token_ids), self._table.page_size)

    def _is_encoding(self, request: Request, num_cached: int) -> bool:
        """Return whether images after the cached tokens are being encoded or queued. Queue them if
        there is capacity. The forward encodes images that are evicted meanwhile."""
        if self._encoder is None or not request.spec.images:
            return False
        if request.encoding is None:
            images = [image for image in request.spec.images if image.end > num_cached]
            request.encoding = self._encoder.begin(images)
            if request.encoding is None:
                return True
            if request.is_encoding:
                request.encoded = [self._clock()]
        if not request.is_encoding and len(request.encoded) == 1:
            request.encoded.append(self._clock())
        return request.is_encoding

    def _match(self, request: Request) -> PrefixMatch:
        return self._cache.match(request.reusable_tokens, request.namespace)

    def _needed_pages(self, request: Request, match: PrefixMatch) -> int:
        """Return the available pages that the request takes: new ones, and evictable ones of its
        cached prefix."""
        if not match.num_tokens:
            return self._fresh_pages(request, match)
        evictable = self._pages.unused(match.pages)
        return self._fresh_pages(request, match) + int(np.count_nonzero(evictable))

    def _fresh_pages(self, request: Request, match: PrefixMatch) -> int:
        num_pages = self._tables.num_pages(len(request.token_ids)) - match.holding.num_pages
        return num_pages * self._tables.num_tables + self._tables.state_pages

    def _reserve(
        self, request: Request, match: PrefixMatch, end: int, adder: PrefillAdder
    ) -> ExtendRow:
        start = match.num_tokens
        if start:
            self._pages.hold(match.holding.flat(), PageHolder.REQUEST)
            self._pages.hold(match.state, PageHolder.STEP)
        fresh = self._cache.allocate(self._fresh_pages(request, match), PageHolder.REQUEST)
        assert fresh is not None
        holding = match.holding.and_behind(fresh, self._tables.state_pages)
        slot = self.take_slot(request, holding)
        assert slot is not None
        if self.waiting.was_returned(request):
            request.swapped_in(self._clock())
        else:
            request.admitted = self._clock()
            request.cached_tokens = min(start, request.num_prompt)
            self.cached_tokens += request.cached_tokens
            self.admitted_tokens += request.num_prompt
            if self._tiers is not None:
                self._tiers.used(request.token_ids[:start], request.namespace)
        self.waiting.remove(request)
        self._on_admit(request, holding)
        self.under_way.add(request, len(request.token_ids) - start)
        branch = match.shared.shape[1] * self._table.page_size
        return self._row(request, slot, start, end, adder, branch, match.state)
