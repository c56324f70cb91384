"""Requests that have a slot, from admission to their end. The parts of the scheduler share it.

All starts and ends of requests go through this module, which updates every part of the scheduler
that keeps state of a request. `check_books` compares the known holders of every page, host page and
slot with the hold counts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from grpc import StatusCode
from numpy.typing import NDArray

from common.errors import EngineFault
from common.requests.namespace import Namespace
from engine.batch.batch import Ints
from engine.batch.holding import PageHolding
from engine.batch.request import FinishReason, Request, RequestEnd
from engine.batch.table import SlotTable
from engine.core import EngineCore
from engine.grammar.matching import Match
from engine.kv_cache.pages import PageAllocator, PageHolder, Pages
from engine.scheduler.admission import PrefillAdmission
from engine.scheduler.assembly import LaunchedSteps, ScheduledStep
from engine.scheduler.retraction import RetractedRequests
from engine.scheduler.running import QuarantineQueue, RunningBatch


@dataclass(frozen=True, slots=True, eq=False)
class PausedRequest:
    """A paused request with its pages. token_ids: all tokens. The newest has no KV yet."""

    token_ids: Ints
    holding: PageHolding


class CorruptPrefix(NamedTuple):
    """Token ids of corrupt KV, which produced logits with NaN or Inf. The KV is removed from the
    prefix cache."""

    token_ids: NDArray[np.int32]
    namespace: Namespace
    given_by: Sequence[int]  # nodes from which some of the KV was read


class SlotOwners:
    """Requests by slot. Engine thread only.

    Attributes:
        num_ended: requests ended since the start.
    """

    def __init__(
        self,
        core: EngineCore,
        admission: PrefillAdmission,
        running: RunningBatch,
        retracted: RetractedRequests,
        quarantine: QuarantineQueue,
        launched: LaunchedSteps,
    ) -> None:
        self._table = core.table
        self._pages = core.pages
        self._cache = core.cache
        self._clock = core.clock
        self._admission = admission
        self._running = running
        self._retracted = retracted
        self._quarantine = quarantine
        self._launched = launched
        self._requests: dict[int, Request] = {}
        self.num_ended = 0

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def by_slot(self) -> Mapping[int, Request]:
        """Requests by slot. Read-only."""
        return self._requests

    @property
    def num_on_device(self) -> int:
        return len(self._requests) - len(self._retracted)

    @property
    def all_away(self) -> bool:
        """Return whether all requests are swapped out and none is on its way back."""
        return len(self._requests) == self._retracted.num_away

    def record(self, slot: int, request: Request) -> None:
        """Record that the request has this slot. Called for every chunk."""
        self._requests[slot] = request

    def run(self, slot: int, request: Request) -> None:
        """Start decoding. The prompt is computed, or will be computed by a launched step."""
        self._running.join(slot)
        self._quarantine.add(slot, request)

    def end(self, request: Request, *, insert: bool = False) -> None:
        """Remove a request and release its pages.

        Args:
            insert: insert its full pages into the prefix cache, with the KV of all known tokens
                except the newest. Only valid once its forward is finished.
        """
        self._leave(self._release(request, insert), request)
        self.num_ended += 1

    def end_at_fault(self, request: Request) -> CorruptPrefix:
        """End a request whose logits contain NaN or Inf, and remove its KV from the prefix
        cache."""
        assert request.slot is not None
        corrupt = CorruptPrefix(
            self._table.tokens_of(request.slot), request.namespace, tuple(request.given_by)
        )
        self._cache.forget(corrupt.token_ids, corrupt.namespace)
        self.end(request)
        return corrupt

    def requeue(self, request: Request, *, insert: bool = False) -> None:
        """Put a request back at the head of the waiting queue, with all its tokens and without KV.

        No launched step may contain it.

        Args:
            insert: see `end`.
        """
        self._release(request, insert)
        if not request.is_away:
            request.swapped_out(self._clock())
        self.put_back(request)

    def put_back(self, request: Request) -> None:
        """Put a retracted request whose KV is lost back at the head of the waiting queue."""
        slot = request.slot
        assert slot is not None
        request.token_ids = self._table.tokens_of(slot)
        request.loaded = request.encoding = None
        request.given_by.clear()
        self._leave(slot, request)
        self._admission.waiting.put_back(request)

    def _release(self, request: Request, insert: bool) -> int:
        """Release the pages of a request on the device and in host memory. Return its slot, which
        it keeps until `_leave`."""
        slot = request.slot
        assert slot is not None
        holding = self._table.holding_of(slot)
        if request in self._retracted:
            self._retracted.forget(request)
        elif insert:
            self._cache.insert(self._table.tokens_of(slot)[:-1], holding, request.namespace)
        self._launched.hold_written(slot)
        self._pages.drop(holding.flat(), PageHolder.REQUEST)
        self._running.leave(slot)
        self._admission.forget(request)
        return slot

    def _leave(self, slot: int, request: Request) -> None:
        self._quarantine.forget(slot)
        self._table.release(request)
        del self._requests[slot]


class MaskWaits:
    """Rows that wait for the mask of their grammar (`SlotTable.held`). Engine thread only."""

    def __init__(
        self,
        table: SlotTable,
        owners: SlotOwners,
        running: RunningBatch,
        retracted: RetractedRequests,
    ) -> None:
        self._table = table
        self._owners = owners
        self._running = running
        self._retracted = retracted

    @property
    def any(self) -> bool:
        """Return whether a row waits. Safe to call from another thread."""
        return bool(np.count_nonzero(self._table.held))

    def settle(self) -> Iterator[tuple[Request, RequestEnd]]:
        """Release rows whose mask is ready. Yield requests that have to end, and the reason."""
        for slot in np.flatnonzero(self._table.held & self._table.live).tolist():
            request = self._owners.by_slot[slot]
            if request.to_finish is not None or self._table.in_flight(slot):
                continue
            match: Match = request.match
            if match.busy:
                match.look()
            if match.fault:
                finish = RequestEnd(FinishReason.ERROR, match.fault, StatusCode.INVALID_ARGUMENT)
                yield request, finish
            elif not match.busy:
                match.ask(self._table.unfollowed(slot, match.num_followed))
                if match.ready:
                    self._release_row(slot, request)
                else:
                    match.threads.start(match)

    def _release_row(self, slot: int, request: Request) -> None:
        """Release a row. If its forward ran without choosing a token, restart the request from the
        prefix cache, because a recurrent state must not process a token twice."""
        if not self._table.unchosen[slot]:
            self._table.held[slot] = False
        elif slot in self._running or request in self._retracted:  # otherwise it is paused
            self._owners.requeue(request, insert=request not in self._retracted)


def check_books(
    core: EngineCore,
    owners: SlotOwners,
    retracted: RetractedRequests,
    launched: Sequence[ScheduledStep],
    elsewhere: Mapping[PageHolder, Iterable[Pages]],
) -> None:
    """Compare the hold counts of all pages with the known holders.

    Args:
        elsewhere: pages that other parts hold, by kind of holder. One array per hold.
    Raises:
        EngineFault: a page or slot leaked, or was allocated twice.
    """
    table, pages, tiers = core.table, core.pages, core.tiers
    pages.check()
    core.cache.check()
    table.check()
    core.host_pages.check()
    if tiers is not None:
        tiers.check()
    slots = np.flatnonzero(table.live)
    if sorted(owners.by_slot) != slots.tolist():
        raise EngineFault(f"slots {slots} are live, requests have {sorted(owners.by_slot)}")
    known: dict[PageHolder, list[Pages]] = {holder: [] for holder in PageHolder}
    known[PageHolder.REQUEST] = [table.pages_of(int(slot)) for slot in slots]
    known[PageHolder.STEP] = [held for step in launched for held in step.held()]
    known[PageHolder.STEP] += retracted.unsaved_pages()
    known[PageHolder.COPY].extend(() if tiers is None else tiers.copied())
    del known[PageHolder.CACHE]  # the tree has checked its pages itself
    for holder, mine in known.items():
        _check_holds(pages, holder, [*mine, *elsewhere.get(holder, ())])
    swapped = [copied for step in launched for copied in step.swaps.on_host()]
    on_host: dict[PageHolder, Sequence[Pages]] = {
        PageHolder.REQUEST: retracted.host_pages(),
        PageHolder.STEP: swapped,
        PageHolder.COPY: [] if tiers is None else [*tiers.copied_on_host()],
    }
    for holder, held in on_host.items():
        _check_holds(core.host_pages, holder, held, "host pages")


def _check_holds(
    pages: PageAllocator, holder: PageHolder, known: Sequence[Pages], what: str = "pages"
) -> None:
    counts = np.zeros(pages.num_pages, np.int32)
    for held in known:
        counts[held] += 1
    wrong = np.flatnonzero(counts != pages.holds(holder))
    if len(wrong):
        raise EngineFault(f"{what} {wrong} have {holder.name} holds that belong to no request")
