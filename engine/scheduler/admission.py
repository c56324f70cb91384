"""Admission: from the waiting queue to the rows of a prefill forward.

A request is admitted all or nothing: its cached prefix is held, the pages of its whole prompt are
reserved and it has a slot, or it holds nothing. Its prompt may then take several forwards, one
chunk each; one request at most is between chunks, and it goes first. Who finds no room may be
overtaken by who does, until it has waited too long (arrivals.py). Of whom a tier below the prefix
cache has more waits for that, once, when there is room for it.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from common.config import SchedulerConfig
from engine.batch.batch import Ints
from engine.batch.holding import Holding
from engine.batch.request import Request
from engine.batch.table import RequestTable
from engine.kv_cache.pages import Holder, PageAllocator
from engine.kv_cache.radix import Match, RadixCache
from engine.kv_cache.radix_states import NO_STATE
from engine.offload.tiers import Tiers
from engine.scheduler.adder import PrefillAdder
from engine.scheduler.arrivals import Claim, is_overdue
from engine.scheduler.boundaries import stretch
from engine.scheduler.growth import NewTokenRatio, missing_pages_of_one
from engine.scheduler.policy import SchedulePolicy
from engine.scheduler.retracted import RetractedRequests
from engine.scheduler.waiting import PromptsUnderWay, WaitingQueue

DEFAULT_CHUNK_TOKENS = 2048


@dataclass(frozen=True, slots=True, eq=False)
class ExtendRow:
    """Token indices [start, end) of a request's prompt; `last` ends it.

    Pages of states, if any, are held by the step to come: `resumed` has the one that the row goes
    on from, `kept` takes the one after token `keep`, for the cache. `branch`: see boundaries.py.
    """

    request: Request
    slot: int
    start: int
    end: int
    last: bool
    resumed: Ints = field(default_factory=lambda: NO_STATE)
    kept: Ints = field(default_factory=lambda: NO_STATE)
    keep: int = 0
    branch: int = 0

    @property
    def states(self) -> tuple[Ints, ...]:
        """Those that the step holds."""
        return tuple(pages for pages in (self.resumed, self.kept) if len(pages))

    @property
    def samples(self) -> bool:
        """Whether a token follows."""
        return self.last and self.request.pooling is None


@dataclass(frozen=True, slots=True)
class _Full:
    """batch_is_full: of these nobody can get in with less room than that."""

    of: tuple[int, int, float, float]  # changes of the queue, pages in the cache, barrier, floor
    num_pages: float


class Admission:
    """The waiting queue and the chunk under way. Engine thread only."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        eos_token_ids: Sequence[int],
        table: RequestTable,
        pages: PageAllocator,
        cache: RadixCache,
        tiers: Tiers,
        retracted: RetractedRequests,
        ratio: NewTokenRatio,
        on_admit: Callable[[Request, Holding], None],
    ) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._table = table
        self._tables = table.tables
        self._pages = pages
        self._cache = cache
        self._tiers = tiers
        self._retracted = retracted
        self._ratio = ratio
        self._on_admit = on_admit
        self._most_on_device = table.num_slots - config.spare_slots
        self._max_prefill_tokens = config.max_prefill_tokens
        chunk = config.chunk_tokens or DEFAULT_CHUNK_TOKENS
        self._chunk_tokens = None if chunk < 0 else max(chunk, table.page_size)
        self._full: dict[bool, _Full] = {}  # by whether it is of suspects
        self.waiting = WaitingQueue(SchedulePolicy(config.policy, cache, table.routing_keys))
        self.under_way = PromptsUnderWay(table.page_size, states=self._tables.state_pages > 0)
        self.chunked: ExtendRow | None = None  # the last chunk launched of a prompt with more
        self.cached_tokens = 0
        self.admitted_tokens = 0

    def max_length(self, request: Request) -> int:
        """Tokens that it may have at most: asked for, in the context, in the whole pool."""
        return min(
            request.num_prompt + request.sampling.max_tokens,
            self._table.context_length,
            self._tables.max_tokens(self._pages.num_pages) + 1,  # the last one has no KV
        )

    def growth_pages(self, request: Request) -> int:
        """Pages to keep free for a request that has the pages of its tokens, and its next token
        in flight."""
        num_tokens, size = len(request.token_ids), self._table.page_size
        missing = missing_pages_of_one(
            num_tokens + 1,
            self.max_length(request),
            self._tables.num_pages(num_tokens) * size,
            self._ratio.value,
            size,
        )
        return self._tables.growth(num_tokens, missing)

    def take_slot(self, request: Request, holding: Holding) -> int | None:
        """Puts a request and its pages into the table. None: no slot is free."""
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
        floor: float,
        kept_slots: int,
        barrier: float,
        alone: bool,
        suspect: bool = False,
    ) -> list[ExtendRow]:
        """The prefill rows of the next forward; empty where there is nothing to prefill.

        Args:
            reserved_pages: kept free for the growth of running requests.
            num_decode_rows: rows that will ride along, and take from the chunk's budget.
            floor: nobody who is less urgent is let in.
            kept_slots: not to be taken.
            barrier: nobody whose place is behind this is let in.
            alone: nothing is on the device, so that a request which merely fits must be let in.
            suspect: False: of requests that may share a forward; True: of one that may not.
        """
        chunk_tokens = self._chunk_tokens
        adder = PrefillAdder(
            page_size=self._table.page_size,
            reserved_pages=reserved_pages,
            input_tokens=self._max_prefill_tokens,
            chunk_tokens=None if chunk_tokens is None else max(chunk_tokens - num_decode_rows, 0),
        )
        adder.reserve(self.growth_of_chunked)
        rows: list[ExtendRow] = []
        chunked = self.chunked
        if chunked is not None and chunked.request.to_finish is None:
            if chunked.request.suspect is suspect:
                rows.append(self._next_chunk(chunked, adder))
            if suspect:
                return rows
        if self.chunked is not None or not self.has_slot(kept_slots, floor):
            return rows
        if alone or not self._is_full(adder, barrier, floor, suspect):
            self._admit(adder, rows, kept_slots, barrier, floor, alone, suspect)
        return rows

    def has_slot(self, kept_slots: int, floor: float = -math.inf) -> bool:
        """Does anybody wait that is so urgent, and is there a slot for him?"""
        if not self.waiting or self.waiting.highest_priority < floor:
            return False
        return self.num_free_slots > kept_slots

    @property
    def num_free_slots(self) -> int:
        """For who is let in."""
        return min(self._table.num_free, self.num_places)

    @property
    def num_places(self) -> int:
        """How many more may run or be computed; those that were taken off the device have slots,
        and no place there."""
        return self._most_on_device - self._table.num_live + self._retracted.num_away

    def needed_pages(self, request: Request) -> int:
        """That it would take now, with all that has to be kept free for it."""
        match = self._match(request)
        return self._needed_pages(request, match) + self.growth_pages(request)

    @property
    def claim(self) -> Claim | None:
        """Of the first that waits, for room or for its turn: the pages that it needs at most."""
        first = next(iter(self.waiting), None)
        if first is None:
            return None
        num_pages = self._tables.pages_to_compute(len(first.token_ids))
        return Claim(first.arrived, num_pages + self.growth_pages(first), first.spec.priority)

    @property
    def suspect_waits(self) -> bool:
        """Whether the next rows might be those of a request that shares no forward."""
        if self.chunked is not None:
            return self.chunked.request.suspect
        return self.waiting.has_suspects

    @property
    def growth_of_chunked(self) -> int:
        """Pages to keep free for the prompt under way, which is not running yet."""
        return 0 if self.chunked is None else self.growth_pages(self.chunked.request)

    def computed(self, row: ExtendRow) -> None:
        """The forward of this row is done."""
        self.under_way.computed(row.request, row.end - row.start)

    def forget(self, request: Request) -> None:
        """It has ended, or left the device, wherever it was on its way."""
        self.under_way.remove(request)
        if self.chunked is not None and self.chunked.request is request:
            self.chunked = None

    def _next_chunk(self, before: ExtendRow, adder: PrefillAdder) -> ExtendRow:
        num_tokens = len(before.request.token_ids)
        end = adder.cut(before.end, num_tokens)
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
        """Pages for one to keep, unless somebody may need them; nothing fails for want of it."""
        num_pages = self._tables.state_pages
        if not adder.has_room(num_pages, self._cache.num_available):
            return NO_STATE
        pages = self._cache.allocate(num_pages, Holder.STEP)
        return NO_STATE if pages is None else pages

    def _is_full(self, adder: PrefillAdder, barrier: float, floor: float, suspect: bool) -> bool:
        """Has nothing changed since everybody was tried in vain that could let one of them in?"""
        full = self._full.get(suspect)
        if full is None or full.of != self._tried(barrier, floor):
            return False
        return not adder.has_room(full.num_pages, self._cache.num_available)

    def _tried(self, barrier: float, floor: float) -> tuple[int, int, float, float]:
        return self.waiting.num_changes, self._cache.num_pages, barrier, floor

    def _admit(
        self,
        adder: PrefillAdder,
        rows: list[ExtendRow],
        kept_slots: int,
        barrier: float,
        floor: float,
        alone: bool,
        suspect: bool,
    ) -> None:
        """Adds rows while budgets last; of suspects one."""
        self._full.pop(suspect, None)
        now, least = time.monotonic(), math.inf
        held_back = False
        for request in self.waiting.in_order():
            if not self.has_slot(kept_slots):
                return
            returned = self.waiting.was_returned(request)
            if request.spec.priority < floor or (request.place > barrier and not returned):
                continue
            if request.suspect is not suspect:  # its turn is another step
                if is_overdue(request.arrived, now):
                    break
                continue
            match = self._match(request)
            if self._cache.enabled and self.under_way.worth_waiting(
                self._wanted(request), request.namespace, match.num_tokens
            ):
                held_back = True
                continue
            growth = self.growth_pages(request)
            needed = self._needed_pages(request, match)
            if rows or not alone:
                needed += growth
            if not adder.has_room(needed, self._cache.num_available):
                least = min(least, needed)
                if returned or is_overdue(request.arrived, now):
                    break
                continue
            if self._is_coming(request):
                held_back = True
                continue
            end = adder.cut(match.num_tokens, len(request.token_ids))
            if end == match.num_tokens:
                return  # budgets of this forward, not room: try again next time
            adder.reserve(growth)
            rows.append(self._let_in(request, match, end, adder))
            if self.chunked is not None or suspect:
                return
        if not held_back:
            self._full[suspect] = _Full(self._tried(barrier, floor), least)

    def _is_coming(self, request: Request) -> bool:
        """Whether what a tier below has of it is on its way, now that there is room for it."""

        def over() -> None:
            request.brought = True
            request.note_brought(time.monotonic())

        if request.brought is None:
            way = self._tiers.way(self._wanted(request), request.namespace)
            if way is not None and self._tiers.bring(way, self._cache.num_available, over):
                request.brought = False
                request.bringing.append(time.monotonic())
        return request.brought is False

    def _wanted(self, request: Request) -> Ints:
        """Of its tokens, those whose KV may come from the cache."""
        return request.token_ids[: 0 if request.computed_whole else -1]

    def _match(self, request: Request) -> Match:
        return self._cache.match(self._wanted(request), request.namespace)

    def _needed_pages(self, request: Request, match: Match) -> int:
        """Pages that it takes from those available now: fresh ones, and those of its cached
        prefix that could be evicted as long as it does not hold them."""
        loose = self._pages.held_only_by(match.pages, Holder.CACHE)
        return self._fresh_pages(request, match) + int(np.count_nonzero(loose))

    def _fresh_pages(self, request: Request, match: Match) -> int:
        num_pages = self._tables.num_pages(len(request.token_ids)) - match.holding.num_pages
        return num_pages * self._tables.num_tables + self._tables.state_pages

    def _let_in(self, request: Request, match: Match, end: int, adder: PrefillAdder) -> ExtendRow:
        start = match.num_tokens
        self._pages.hold(match.holding.flat(), Holder.REQUEST)
        self._pages.hold(match.state, Holder.STEP)
        fresh = self._cache.allocate(self._fresh_pages(request, match), Holder.REQUEST)
        assert fresh is not None
        holding = match.holding.and_behind(fresh, self._tables.state_pages)
        slot = self.take_slot(request, holding)
        assert slot is not None
        if self.waiting.was_returned(request):
            request.return_to_device(time.monotonic())
        else:
            request.admitted = time.monotonic()
            request.cached_tokens = min(start, request.num_prompt)
            self.cached_tokens += request.cached_tokens
            self.admitted_tokens += request.num_prompt
            self._tiers.used(request.token_ids[:start], request.namespace)
        self.waiting.remove(request)
        self._on_admit(request, holding)
        self.under_way.add(request, len(request.token_ids) - start)
        branch = match.shared.shape[1] * self._table.page_size
        return self._row(request, slot, start, end, adder, branch, match.state)
