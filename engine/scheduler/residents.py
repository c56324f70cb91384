"""The requests that have a slot, from admission to their end: in chunks, running or retracted.

One way to run and one way out, whoever asks: every part of the scheduler that keeps something of a
request is told here.
"""

import time
from collections.abc import Mapping

from engine.batch.holding import Holding
from engine.batch.request import Request
from engine.batch.table import RequestTable
from engine.kv_cache.pages import Holder, PageAllocator
from engine.kv_cache.radix import RadixCache
from engine.scheduler.admission import Admission
from engine.scheduler.outcome import Spoilt
from engine.scheduler.quarantine import Quarantine
from engine.scheduler.retracted import RetractedRequests
from engine.scheduler.running import RunningBatch


class Residents:
    """By slot. Engine thread only.

    Attributes:
        num_ended: since the start.
    """

    def __init__(
        self,
        *,
        table: RequestTable,
        pages: PageAllocator,
        cache: RadixCache,
        admission: Admission,
        running: RunningBatch,
        retracted: RetractedRequests,
        quarantine: Quarantine,
    ) -> None:
        self._table = table
        self._pages = pages
        self._cache = cache
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
        """Not to be changed."""
        return self._requests

    @property
    def num_on_device(self) -> int:
        return len(self._requests) - len(self._retracted)

    @property
    def all_away(self) -> bool:
        """Whether none of them has pages on the device, or is about to have its own back."""
        return len(self._requests) == self._retracted.num_away

    def take(self, slot: int, request: Request) -> None:
        """It has this slot; of each chunk anew."""
        self._requests[slot] = request

    def run(self, slot: int, request: Request) -> None:
        """Its prompt is computed, or will be by a launched step: it decodes from now on."""
        self._running.join(slot)
        self._quarantine.take(slot, request)

    def end(self, request: Request, *, learn: bool = False) -> None:
        """Takes a request out, with its pages. With `learn`, once its forward is finished, the
        tree gets its full pages: KV of all tokens that are known but the newest."""
        self._leave(self._let_go(request, learn), request)
        self.num_ended += 1

    def end_at_fault(self, request: Request) -> Spoilt:
        """As `end`; and nobody finds its KV any more, which makes logits that are no numbers."""
        assert request.slot is not None
        spoilt = Spoilt(
            self._table.tokens_of(request.slot), request.namespace, tuple(request.given_by)
        )
        self._cache.forget(spoilt.token_ids, spoilt.namespace)
        self.end(request)
        return spoilt

    def start_over(self, request: Request, *, learn: bool = False) -> None:
        """Puts it at the head of the waiting queue, with all its tokens and without its KV,
        wherever that is. No launched step may have it. `learn`: see `end`."""
        self._let_go(request, learn)
        if not request.is_away:
            request.leave_device(time.monotonic())
        self.put_back(request)

    def put_back(self, request: Request) -> None:
        """To the head of the waiting queue, with all its tokens: it was retracted and nothing of
        its KV is left."""
        slot = request.slot
        assert slot is not None
        request.token_ids = self._table.tokens_of(slot)
        request.brought = None
        request.given_by.clear()
        self._leave(slot, request)
        self._admission.waiting.put_back(request)

    def _let_go(self, request: Request, learn: bool) -> int:
        """Of its pages, here and in host memory. Returns its slot, which it still has."""
        slot = request.slot
        assert slot is not None
        holding = self._table.holding_of(slot)
        if request in self._retracted:
            self._retracted.forget(request)
        elif learn:
            self._cache.insert(self._table.tokens_of(slot)[:-1], holding, request.namespace)
        self._pages.drop(holding.flat(), Holder.REQUEST)
        self._running.leave(slot)
        self._admission.forget(request)
        self._table.set_pages(slot, Holding.none(self._table.tables.num_tables))
        return slot

    def _leave(self, slot: int, request: Request) -> None:
        self._quarantine.forget(slot)
        self._table.release(request)
        del self._requests[slot]
