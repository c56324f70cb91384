"""The hand-offs of a prefill node: bootstrap queue -> scheduler -> inflight queue.

    Opened            Granted                    last chunk done         ClosedEvent
      -> bootstrap queue -> waiting, prefilling  ------------> inflight queue -> gone

A hand-off may be dropped in any queue: its consumer cancelled it, its stream ended, or its budget
expired. Its pages are held for publication from admission until then, whatever happens to the
request.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import ServingError
from common.logs.throttle import Throttle, ThrottledLog
from common.page_tables import PageTables
from common.queueing.drain import QueueEstimator
from common.queueing.waiting_line import QueueEntry
from common.requests.request_trace import RequestTrace, RequestTraces
from engine.adapters.adapters import AdapterManager
from engine.batch.holding import PageHolding
from engine.batch.request import FinishReason, Ints, Request, RequestEnd
from engine.batch.token_budget import TokenBudget
from engine.kv_cache.pages import PageAllocator, PageHolder
from engine.scheduler.scheduler import ChunkDone, Scheduler
from kvtransfer.messages import Live, Prompt
from kvtransfer.ports import (
    ClosedEvent,
    FailCommand,
    GrantedEvent,
    OpenedEvent,
    PublishCommand,
    QueuedCommand,
    TransferPort,
)
from node.control.engine_control import EngineControl
from node.queues.preparations import PreparationStages
from node.sharing.prefixes import PrefixSharing
from prefill_node.admission import COUNTS, HandoffAdmission, refusal_of
from prefill_node.handoff_history import HandoffHistory

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class PrefillHandoff:
    """A granted hand-off whose prompt waits for its pages or is being computed."""

    serial: int
    request: Request
    prefix_tokens: int  # tokens that the consumer has
    published: int  # token ranges up to here are published
    holding: PageHolding  # pages of the whole prompt; empty until admission


class OutgoingHandoffs:
    """Outgoing hand-offs. Engine thread only.

    The watchdog may call `told` and `flights` while that thread is stalled.

    Args:
        prompts: queue of prompts that are granted and not computed yet.
        tokens: count of tokens of prompts without pages.
    """

    def __init__(
        self,
        door: HandoffAdmission,
        *,
        scheduler: Scheduler,
        pages: PageAllocator,
        tables: PageTables,
        port: TransferPort,
        desk: EngineControl,
        adapters: AdapterManager,
        preparations: PreparationStages[None],
        sharing: PrefixSharing,
        prompts: QueueEstimator,
        tokens: TokenBudget,
    ) -> None:
        self._door = door
        self._scheduler = scheduler
        self._pages = pages
        self._tables = tables
        self._port = port
        self._adapters = adapters
        self._preparations = preparations
        self._sharing = sharing
        self._prompts = prompts
        self._tokens = tokens
        # By the serial of the hand-off, which is also the key of its request.
        self._bootstrap: dict[int, Request] = {}
        self._prefilling: dict[int, PrefillHandoff] = {}
        self._inflight: dict[int, PrefillHandoff] = {}
        self._lent: dict[int, Ints] = {}  # pages held for publication
        self._records = HandoffHistory(ThrottledLog(log, Throttle(most=100)), desk.notify)
        outcomes = ("handoffs_completed", "handoffs_failed", "handoffs_aborted", "refused/dropped")
        self._counts = dict.fromkeys((*outcomes, *COUNTS), 0)

    # Status ---------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return bool(self._bootstrap or self._prefilling or self._inflight or self._lent)

    @property
    def lent(self) -> Sequence[Ints]:
        """Pages held for publication, one array per hand-off."""
        return tuple(self._lent.values())

    def queues(self) -> dict[str, int]:
        return {"bootstrap": len(self._bootstrap), "inflight": len(self._inflight)}

    def counters(self) -> dict[str, int]:
        return dict(self._counts)

    def told(self) -> list[dict[str, object]]:
        """Return the log fields of each hand-off: its queue, its request and its age."""
        now = time.monotonic()
        open_here = {
            "bootstrap": tuple(self._bootstrap.values()),
            "prefilling": tuple(each.request for each in tuple(self._prefilling.values())),
            "inflight": tuple(each.request for each in tuple(self._inflight.values())),
        }
        return [
            {
                "queue": queue,
                "request_id": request.spec.request_id,
                "serial": request.key,
                "tokens": len(request.token_ids),
                "open_s": now - request.arrived,
            }
            for queue, requests in open_here.items()
            for request in requests
        ]

    def explain(self, request_id: str) -> RequestTraces:
        return self._records.explain(request_id)

    def flights(self, num_ended: int) -> list[tuple[str, RequestTrace]]:
        return self._records.flights(num_ended)

    # Events of one hand-off -----------------------------------------------------------------------

    def open(self, event: OpenedEvent) -> None:
        now = time.monotonic()
        source = event.source
        assert isinstance(source, Prompt | Live)  # PrefixSharing handles the other sources
        self._records.open(event, source.spec, now)
        num_waiting = len(self._bootstrap) + len(self._preparations) + self._scheduler.num_waiting
        try:
            request = self._door.take(event, num_waiting, now)
        except ServingError as refusal:
            return self._refuse(event.serial, refusal)
        self._bootstrap[event.serial] = request
        if isinstance(source, Prompt) and source.prefix_hints:
            room, queued_s = self._scheduler.free_capacity().num_pages, self._prompts.queued_s
            self._sharing.fetch(request, source.prefix_hints, room=room, queued_s=queued_s)

    def grant(self, event: GrantedEvent) -> None:
        request = self._bootstrap.pop(event.serial, None)
        if request is None:
            return  # it failed here before the grant arrived; ClosedEvent will follow
        stamps = self._records[event.serial]
        stamps.granted, stamps.prefix_tokens = time.monotonic(), event.prefix_tokens
        self._prefilling[event.serial] = PrefillHandoff(
            serial=event.serial,
            request=request,
            prefix_tokens=event.prefix_tokens,
            published=event.prefix_tokens,
            holding=PageHolding.none(self._tables.num_tables),
        )
        place = QueueEntry(request.due, len(request.token_ids), request.spec.priority)
        self._prompts.join(event.serial, place, time.monotonic())
        try:
            self._preparations.put(request, None)
        except ServingError as refusal:
            self._refuse(request.key, refusal)

    def prepared(self, request: Request, refusal: ServingError | None) -> None:
        """Schedule a prepared request, or reject it if its preparation failed (`refusal`)."""
        try:
            if refusal is not None:
                raise refusal
            self._scheduler.add(request)
        except ServingError as error:
            self._refuse(request.key, error)

    def admitted(self, request: Request, holding: PageHolding) -> None:
        """Publish the cached pages of a prompt for which the scheduler has reserved all pages."""
        handoff = self._prefilling[request.key]
        handoff.holding = holding
        num_tokens = len(request.token_ids)
        lent = holding.take(self._tables.handed_over(num_tokens, handoff.prefix_tokens))
        self._tokens.drop(handoff.serial)
        self._sharing.admitted(request)
        stamps = self._records[handoff.serial]
        stamps.admitted, stamps.cached_tokens = request.admitted, request.cached_tokens
        stamps.bringing = request.bringing
        self._pages.hold(lent, PageHolder.PUBLICATION)
        self._lent[handoff.serial] = lent
        self._port.post(
            QueuedCommand(
                handoff.serial,
                compute_tokens=num_tokens - request.cached_tokens,
                queued_tokens=self._scheduler.queued_tokens(),
            )
        )
        # Whole pages only: generated tokens may be cached too, but this counts the prompt alone.
        self._publish(handoff, self._whole_pages(request.cached_tokens))

    def computed(self, chunk: ChunkDone) -> None:
        handoff = self._prefilling.get(chunk.request.key)
        if handoff is None:
            return
        self._records[handoff.serial].num_chunks += 1
        num_left = len(chunk.request.token_ids) - chunk.end
        self._prompts.serve(handoff.serial, num_left)
        self._sharing.ways.computed(handoff.serial, num_left)
        if chunk.first_token is None:
            self._publish(handoff, self._whole_pages(chunk.end))
            return
        del self._prefilling[handoff.serial]
        self._inflight[handoff.serial] = handoff
        self._adapters.release(handoff.serial)
        self._records[handoff.serial].done = time.monotonic()
        self._publish(handoff, chunk.end, chunk)

    def ended(self, request: Request, finish: RequestEnd) -> None:
        """Fail the hand-off of a request that ended in the scheduler or before."""
        if request.key in self._prefilling:  # else it ended with its first token or was dropped
            self._counts["refused/dropped"] += bool(finish.retry_after_s)
            self._fail(
                request.key,
                finish.error or finish.reason.name.lower(),
                retryable=False,
                retry_after_s=finish.retry_after_s,
            )

    def dropped(self, event: ClosedEvent) -> None:
        self._counts["handoffs_completed" if event.held else "handoffs_failed"] += 1
        self._records.close(event)
        self._forget(event.serial, RequestEnd(FinishReason.ABORT, event.reason))
        lent = self._lent.pop(event.serial, None)
        if lent is not None:
            self._pages.drop(lent, PageHolder.PUBLICATION)

    # Calls of operators ---------------------------------------------------------------------------

    def abort(self, request_id: str) -> int:
        """Cancel all hand-offs of this client request. Returns their number."""
        requests = {
            **self._bootstrap,
            **{serial: handoff.request for serial, handoff in self._prefilling.items()},
            **{serial: handoff.request for serial, handoff in self._inflight.items()},
        }
        doomed = [serial for serial, each in requests.items() if each.spec.request_id == request_id]
        for serial in doomed:
            self._fail(serial, "aborted by an operator", retryable=False)
        return len(doomed)

    def give_up_all(self, why: str) -> None:
        """Fail all hand-offs except computed ones, whose pages are read to the end."""
        for serial in (*self._bootstrap, *self._prefilling):
            self._fail(serial, why, retryable=True)

    # --------------------------------------------------------------------------------------------

    def _publish(
        self, handoff: PrefillHandoff, end: int, last_chunk: ChunkDone | None = None
    ) -> None:
        """Publish [handoff.published, end), page aligned unless it is the last range.

        If the consumer already has a longer prefix, only the last, empty range is published.
        """
        start, last = handoff.published, last_chunk is not None
        if end <= start and not last:
            return
        num_tokens = len(handoff.request.token_ids)
        spans = self._tables.spans(num_tokens, handoff.prefix_tokens, start, end, last=last)
        self._port.post(
            PublishCommand(
                handoff.serial,
                start=start,
                end=end,
                pages=handoff.holding.take(spans),
                last=last,
                first_token=last_chunk.first_token if last_chunk else None,
                times=self._records[handoff.serial].times() if last else None,
                logprobs=last_chunk.logprobs if last_chunk else None,
                prompt_logprobs=last_chunk.prompt_logprobs if last_chunk else None,
            )
        )
        handoff.published = end

    def _whole_pages(self, num_tokens: int) -> int:
        return num_tokens // self._tables.page_size * self._tables.page_size

    def _refuse(self, serial: int, error: ServingError) -> None:
        refusal = refusal_of(error)
        self._counts[refusal.count] += 1
        self._fail(serial, str(error), retryable=refusal.retryable, retry_after_s=error.late_s)

    def _fail(
        self, serial: int, reason: str, *, retryable: bool, retry_after_s: float = 0.0
    ) -> None:
        self._counts["handoffs_aborted"] += 1
        self._forget(serial, RequestEnd(FinishReason.ABORT, reason))
        self._port.post(FailCommand(serial, reason, retryable, retry_after_s))

    def _forget(self, serial: int, finish: RequestEnd) -> None:
        """Remove a hand-off from its queue. Its computation stops at the end of the chunk."""
        self._tokens.drop(serial)
        self._prompts.leave(serial)
        self._sharing.forget(serial)
        self._bootstrap.pop(serial, None)
        self._inflight.pop(serial, None)
        handoff = self._prefilling.pop(serial, None)
        if handoff is not None:
            self._preparations.remove(handoff.request)
            self._scheduler.abort(handoff.request, finish)
        self._adapters.release(serial)
