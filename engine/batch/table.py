"""The slot table: one slot per running request, one numpy column per value.

The work of a step on its rows is a few column operations, whatever the number of rows. The table
has no queues and makes no decisions.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from common.errors import EngineFault
from common.page_tables import PageTables
from engine.batch.batch import Ints
from engine.batch.holding import NO_PAGE, ONE, PageHolding
from engine.batch.request import Request

Slots: TypeAlias = NDArray[np.integer[Any]]  # numpy indexes fastest with np.intp

_NO_PAGES = np.empty(0, np.int32)


class SlotTable:
    """Columns indexed by slot. Engine thread only. A launch copies the values that its forward
    reads.

    `acquire` assigns a slot and `release` returns it. A released slot is reused once no launched
    step has it, so that a late result never reaches a new request. Steps are launched (`hold`) and
    finished (`drop_step`) in the order of their numbers.

    Columns, [num_slots] unless stated otherwise:
        tokens [num_slots, context_length]: prompt, then generated tokens. `known` of them are
            valid, drafts may follow.
        page_table [num_slots, tables, max_pages]: pages in order, by table. `num_pages` of them are
            valid. Pages that left a window are NO_PAGE.
        known: number of tokens that the CPU knows.
        length: `known` plus tokens in flight, including drafts that may be rejected. A decode row
            computes token index length - 1.
        max_length: maximum number of tokens of the request.
        capacity: number of tokens for which it has pages, num_pages * page_size.
        by_table: page_table's columns of each table, [num_slots, max_pages] views.
        first_page [num_slots, tables]: first page that is still inside the window.
        state [num_slots, state pages]: pages of the request's recurrent state, while it has pages.
        stop_ids [num_slots, n]: tokens that end the request, padded with -1. Includes EOS unless
            the request ignores it.
        live: whether the slot has a request that has not ended.
        held: whether the row waits for the mask of its next token, and is in no forward until then.
        unchosen: whether the row's newest forward is done, but no token was chosen after it.
        deadline: time.monotonic() by which the request must end.
        routing_key: routing key of the request. 0: none.

    Args:
        windows, state_pages: see PageTables.
        max_drafts: maximum number of drafts of a row in one step.
    """

    def __init__(
        self,
        num_slots: int,
        context_length: int,
        page_size: int,
        windows: tuple[int | None, ...] = (None,),
        state_pages: int = 0,
        max_drafts: int = 0,
    ) -> None:
        self.max_drafts = max_drafts
        self.tables = PageTables(page_size, windows, state_pages)
        self.num_slots = num_slots
        self.context_length = context_length
        self.page_size = page_size
        self._page_size = np.array(page_size, np.int32)  # see ONE
        max_pages = -(-context_length // page_size)
        # Tokens of all slots, then unused ones, so that guesses can follow every token.
        flat = np.zeros(num_slots * context_length + 1 + 2 * max_drafts, np.int32)
        self.tokens = flat[: num_slots * context_length].reshape(num_slots, context_length)
        self._first_tokens = np.arange(num_slots) * context_length
        self._following = sliding_window_view(flat[1:], 2 * max_drafts)
        # Zeros take no memory before a slot is used. Only the first `num_pages` are read.
        self.page_table = np.zeros((num_slots, len(windows), max_pages), np.int32)
        self.first_page = np.zeros((num_slots, len(windows)), np.int32)
        self.state = np.full((num_slots, state_pages), NO_PAGE, np.int32)
        self.by_table = tuple(self.page_table[:, table] for table in range(len(windows)))
        self._num_full, self._sliding = self.tables.num_full, self.tables.sliding
        self.known = np.zeros(num_slots, np.int32)
        self.length = np.zeros(num_slots, np.int32)
        self.num_prompt = np.zeros(num_slots, np.int32)
        self.max_length = np.zeros(num_slots, np.int32)
        self.num_pages = np.zeros(num_slots, np.int32)
        self.capacity = np.zeros(num_slots, np.int32)
        self.stop_ids = np.full((num_slots, 1), -1, np.int32)
        self.live = np.zeros(num_slots, np.bool_)
        self.held = np.zeros(num_slots, np.bool_)
        self.unchosen = np.zeros(num_slots, np.bool_)
        self.deadline = np.zeros(num_slots, np.float64)
        self.priority = np.zeros(num_slots, np.int32)
        self.routing_key = np.zeros(num_slots, np.uint64)
        self.origin_stream = np.zeros(num_slots, np.uint64)
        self.origin_request = np.zeros(num_slots, np.uint64)
        self._free = list(range(num_slots - 1, -1, -1))
        # The newest launched step that has the slot.
        self._last_step = np.zeros(num_slots, np.int64)
        self.finished_step = 0  # all steps up to this one are finished
        self._leaving: list[int] = []  # released, but still in a launched step
        self._listeners: list[Callable[[int, Request], None]] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_live(self) -> int:
        """Number of slots with a request that has not ended."""
        return self.num_slots - len(self._free) - len(self._leaving)

    def routing_keys(self) -> Counter[int]:
        """Count the running requests per routing key."""
        keys = self.routing_key[self.live]
        return Counter(keys[keys != 0].tolist())

    def add_listener(self, listener: Callable[[int, Request], None]) -> None:
        """Call `listener` with each slot acquired from now on, and its request."""
        self._listeners.append(listener)

    def acquire(self, request: Request, eos_token_ids: Sequence[int] = ()) -> int | None:
        """Give the request a slot without pages, set `request.slot` and fill its columns.

        Returns:
            The slot, or None if no slot is free.
        """
        if not self._free:
            return None
        slot = self._free.pop()
        request.slot = slot
        num_tokens = len(request.token_ids)
        sampling = request.sampling
        self.tokens[slot, :num_tokens] = request.token_ids
        self.known[slot] = self.length[slot] = num_tokens
        self.num_prompt[slot] = request.num_prompt
        self.max_length[slot] = min(request.num_prompt + sampling.max_tokens, self.context_length)
        self.num_pages[slot] = self.capacity[slot] = 0
        self.live[slot] = True
        self.held[slot] = self.unchosen[slot] = False
        self.deadline[slot] = request.deadline
        self.priority[slot] = request.spec.priority
        self.routing_key[slot] = request.spec.routing_key
        self.origin_stream[slot], self.origin_request[slot] = request.origin
        self._set_stop_ids(
            slot, sampling.stop_token_ids + (tuple(eos_token_ids) if sampling.ends_at_eos else ())
        )
        for listener in self._listeners:
            listener(slot, request)
        return slot

    def release(self, request: Request) -> None:
        """Release the slot of a request that ended or must be recomputed. The slot is reused once
        no launched step has it.
        """
        slot = request.slot
        if slot is None or not self.live[slot]:
            raise EngineFault(f"request {request.key} releases a slot that it does not have")
        request.slot = None
        self.live[slot] = self.held[slot] = self.unchosen[slot] = False
        if self.in_flight(slot):
            self._leaving.append(slot)
        else:
            self._free.append(slot)

    def hold(self, slots: Slots, step: int) -> None:
        """Record that a step with these rows was launched."""
        self._last_step[slots] = step

    def drop_step(self, step: int) -> None:
        """Record that this step and all before it are finished."""
        self.finished_step = step
        if self._leaving:
            leaving, self._leaving = self._leaving, []
            for slot in leaving:
                (self._leaving if self.in_flight(slot) else self._free).append(slot)

    def in_flight(self, slot: int) -> bool:
        """Return whether a launched, unfinished step has this slot."""
        return bool(self._last_step[slot] > self.finished_step)

    def set_pages(self, slot: int, holding: PageHolding) -> None:
        num_pages = holding.num_pages
        self.page_table[slot] = NO_PAGE
        self.page_table[slot, :, :num_pages] = holding.tables
        self.state[slot] = holding.state if len(holding.state) else NO_PAGE
        if self._sliding:
            self.first_page[slot] = (holding.tables < 0).sum(axis=1)
        self.num_pages[slot] = num_pages
        self.capacity[slot] = num_pages * self.page_size

    def append_pages(self, slots: Slots, pages: Ints) -> None:
        """Append one page to each table of each slot: pages [len(slots) * tables], slot by slot."""
        num_pages = self.num_pages[slots]
        for table, mine in enumerate(self.by_table):
            mine[slots, num_pages] = pages[table :: len(self.by_table)]
        self.num_pages[slots] = num_pages + ONE
        self.capacity[slots] += self._page_size

    def free_behind(self, slot: int, num_tokens: int) -> Ints:
        """Remove and return a copy of the pages that no window needs once `num_tokens` of the
        request's tokens are *finished* (PageTables.live_from). The caller must free them."""
        gone = [_NO_PAGES]
        for table, _ in self._sliding:
            first = int(self.first_page[slot, table])
            past = min(self.tables.live_from(table, num_tokens), int(self.num_pages[slot]))
            if past > first:
                gone.append(self.page_table[slot, table, first:past].copy())
                self.page_table[slot, table, first:past] = NO_PAGE
                self.first_page[slot, table] = past
        return np.concatenate(gone)

    def growth(self, slots: Slots, more_pages: Ints) -> int:
        """Return the number of pages, over all tables, that `more_pages` per full table of each
        slot take."""
        growth = self._num_full * int(more_pages.sum())
        for table, _ in self._sliding:
            live = self.num_pages[slots] - self.first_page[slots, table]
            room = np.maximum(self.tables.most_live(table) - live, 0)
            growth += int(np.minimum(more_pages, room).sum())
        return growth

    def holding_of(self, slot: int) -> PageHolding:
        """Return a copy of the request's pages."""
        state = self.state[slot]
        if len(state):
            state = state[state >= 0]
        return PageHolding(self.page_table[slot, :, : self.num_pages[slot]].copy(), state)

    def pages_of(self, slot: int) -> Ints:
        """Return a copy of all pages of the request. They are distinct."""
        return self.holding_of(slot).flat()

    def gauges(self) -> dict[str, float]:
        """Return the number of pages of all requests by kind of data, by internal name. The kinds
        are full, window and state.

        Kinds that the model does not have are left out. A shared page counts once per request.
        O(slots).
        """
        slots = np.flatnonzero(self.live & (self.num_pages > 0))
        tables = (self.num_pages[slots, None] - self.first_page[slots]).sum(axis=0)
        sliding = [table for table, _ in self._sliding]
        window = int(tables[sliding].sum())
        kinds = {}
        if self._num_full:
            kinds["full"] = int(tables.sum()) - window
        if sliding:
            kinds["window"] = window
        if self.tables.state_pages:
            kinds["state"] = int(np.count_nonzero(self.state[slots] >= 0))
        return {f"request_pages/{kind}": float(number) for kind, number in kinds.items()}

    def tokens_of(self, slot: int) -> Ints:
        """Return a copy of the tokens that the CPU knows."""
        return self.tokens[slot, : self.known[slot]].copy()

    def unfollowed(self, slot: int, num_followed: int) -> list[int]:
        """Return the known tokens of the response, except the first `num_followed`."""
        start = int(self.num_prompt[slot]) + num_followed
        tokens: list[int] = self.tokens[slot, start : self.known[slot]].tolist()
        return tokens

    def guesses(self, slots: Slots, firsts: Ints) -> Ints:
        """Return the tokens after index firsts[i] of each slot, [n, 2 * max_drafts]. They include
        all drafts of a row that begins at this index, or up to `max_drafts` indices later. Other
        entries have no meaning."""
        found: Ints = self._following[self._first_tokens.take(slots) + firsts]
        return found

    def drafts_of(self, slot: int, count: int) -> list[int]:
        """Return the first `count` drafts after the known tokens."""
        known = int(self.known[slot])
        tokens: list[int] = self.tokens[slot, known : known + count].tolist()
        return tokens

    def origin_of(self, slot: int) -> tuple[int, int]:
        return int(self.origin_stream[slot]), int(self.origin_request[slot])

    def check(self) -> None:
        """Raise EngineFault if a slot is lost or assigned twice."""
        free = np.zeros(self.num_slots, np.bool_)
        free[self._free] = True
        if len(self._free) != np.count_nonzero(free):
            raise EngineFault("slots: one is on the free list twice")
        in_steps = self._last_step > self.finished_step
        if not np.array_equal(free, ~self.live & ~in_steps):
            raise EngineFault(
                f"slots: {len(self._free)} free, {np.count_nonzero(self.live)} live and "
                f"{np.count_nonzero(in_steps)} in steps do not make {self.num_slots}"
            )

    def _set_stop_ids(self, slot: int, stop_ids: Sequence[int]) -> None:
        missing = len(stop_ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=-1)
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(stop_ids)] = stop_ids
