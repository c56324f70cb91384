"""The requests that have a slot, from admission to their end: in chunks, running or retracted.

All starts and ends of requests go through this module, which updates every part of the scheduler
that keeps state of a request.
"""

import time
from collections.abc import Mapping

from engine.batch.holding import PageHolding
from engine.batch.request import Request
from engine.core import EngineCore
from engine.kv_cache.pages import PageHolder
from engine.scheduler.admission import PrefillAdmission
from engine.scheduler.outcome import CorruptPrefix
from engine.scheduler.quarantine import QuarantineQueue
from engine.scheduler.retracted import RetractedRequests
from engine.scheduler.running import RunningBatch


class SlotOwners:
    """Requests by slot. Engine thread only.

    Attributes:
        num_ended: since the start.
    """

    def __init__(
        self,
        core: EngineCore,
        admission: PrefillAdmission,
        running: RunningBatch,
        retracted: RetractedRequests,
        quarantine: QuarantineQueue,
    ) -> None:
        self._table = core.table
        self._pages = core.pages
        self._cache = core.cache
        self._admission = admission
        self._running = running
        self._retracted = retracted
        self._quarantine = quarantine
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
        """Return whether all of them are swapped out and none is on its way back."""
        return len(self._requests) == self._retracted.num_away

    def take(self, slot: int, request: Request) -> None:
        """Record that the request has this slot. Called again for each chunk."""
        self._requests[slot] = request

    def run(self, slot: int, request: Request) -> None:
        """Start decoding. The prompt is computed, or will be by a launched step."""
        self._running.join(slot)
        self._quarantine.take(slot, request)

    def end(self, request: Request, *, learn: bool = False) -> None:
        """Remove a request, with its pages.

        Args:
            learn: insert its full pages into the prefix tree: KV of all known tokens but the
                newest. Only valid once its forward is finished.
        """
        self._leave(self._let_go(request, learn), request)
        self.num_ended += 1

    def end_at_fault(self, request: Request) -> CorruptPrefix:
        """End a request whose logits contain NaN or Inf, and remove its KV from the prefix
        cache."""
        assert request.slot is not None
        spoilt = CorruptPrefix(
            self._table.tokens_of(request.slot), request.namespace, tuple(request.given_by)
        )
        self._cache.forget(spoilt.token_ids, spoilt.namespace)
        self.end(request)
        return spoilt

    def start_over(self, request: Request, *, learn: bool = False) -> None:
        """Put a request back at the head of the waiting queue, with all its tokens and without its
        KV. No launched step may have it. `learn`: see `end`."""
        self._let_go(request, learn)
        if not request.is_away:
            request.leave_device(time.monotonic())
        self.put_back(request)

    def put_back(self, request: Request) -> None:
        """Put a retracted request, none of whose KV is left, at the head of the waiting queue with
        all its tokens."""
        slot = request.slot
        assert slot is not None
        request.token_ids = self._table.tokens_of(slot)
        request.brought = None
        request.given_by.clear()
        self._leave(slot, request)
        self._admission.waiting.put_back(request)

    def _let_go(self, request: Request, learn: bool) -> int:
        """Release its pages on the device and in host memory. Return its slot, which it still
        has."""
        slot = request.slot
        assert slot is not None
        holding = self._table.holding_of(slot)
        if request in self._retracted:
            self._retracted.forget(request)
        elif learn:
            self._cache.insert(self._table.tokens_of(slot)[:-1], holding, request.namespace)
        self._pages.drop(holding.flat(), PageHolder.REQUEST)
        self._running.leave(slot)
        self._admission.forget(request)
        self._table.set_pages(slot, PageHolding.none(self._table.tables.num_tables))
        return slot

    def _leave(self, slot: int, request: Request) -> None:
        self._quarantine.forget(slot)
        self._table.release(request)
        del self._requests[slot]
