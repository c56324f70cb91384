"""The hand-offs of a prefill node, from the consumer's Open to their end.

    OpenedEvent        Granted                    last chunk done         ClosedEvent
     -> bootstrap queue -> waiting, prefilling  ------------> inflight queue -> removed

A hand-off may fail in any queue: the consumer cancels it, its stream ends, or its budget expires.
From admission until ClosedEvent, its pages are held for publication, whatever happens to the
request.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from common.errors import ServingError
from common.logs import ThrottledLog
from common.page_tables import PageTables
from common.queueing import QueueEntry
from common.request import RequestSpec
from common.requests.timeline import RequestTrace, RequestTraces
from common.tracing.context import is_sampled, log_fields
from engine.batch.holding import PageHolding
from engine.batch.request import FinishReason, Ints, Request, RequestEnd
from engine.kv_cache.pages import PageAllocator, PageHolder
from engine.scheduler.scheduler import ChunkDone
from kvtransfer.messages import Live, Prompt, SampledOutput
from kvtransfer.ports import (
    AdmittedCommand,
    ClosedEvent,
    FailCommand,
    GrantedEvent,
    OpenedEvent,
    ProducerCommands,
    PublishCommand,
)
from node.messages import HandoffSpan
from node.request_state import Claim, Ending, RequestStage
from node.sharing.prefixes import PrefixSharing
from node.timings import ProducerTimings, RequestHistory
from prefill_node.admission import (
    COUNTS,
    HandoffAdmission,
    PrefillQueues,
    PrefillState,
    rejection_of,
)
from prefill_node.embeddings import EmbeddingReads

log = logging.getLogger(__name__)


class HandoffHistory:
    """Timings of hand-offs: open ones by serial, and the last ended ones by request id.

    Engine thread only. The watchdog may read it while that thread is stalled.

    Args:
        send: sends hand-offs of traced requests to the frontend.
    """

    def __init__(self, send: Callable[[HandoffSpan], None]) -> None:
        self._log = ThrottledLog(log, most=100)
        self._send = send
        self._open: dict[int, ProducerTimings] = {}
        self._ended = RequestHistory(ProducerTimings)

    def open(self, event: OpenedEvent, spec: RequestSpec, now: float) -> ProducerTimings:
        timings = ProducerTimings(
            spec.request_id,
            spec.num_prompt,
            spec.traceparent,
            now,
            attempt=event.id.attempt,
        )
        self._open[event.serial] = timings
        return timings

    def close(self, event: ClosedEvent) -> None:
        stamps = self._open.pop(event.serial)
        if not event.completed:
            self._log.info(
                "hand-off dropped",
                request_id=stamps.request_id,
                **log_fields(stamps.traceparent),
                id=tuple(event.id),
                reason=event.reason,
            )
        stamps.closed, stamps.completed = time.monotonic(), event.completed
        stamps.reason = event.reason
        self._ended.record(stamps, failed=not event.completed)
        if is_sampled(stamps.traceparent):
            self._send(HandoffSpan(stamps))

    def explain(self, request_id: str) -> RequestTraces:
        return self._ended.explain(request_id, tuple(self._open.values()))

    def flights(self, num_ended: int) -> list[tuple[str, RequestTrace]]:
        return self._ended.flights(num_ended, tuple(self._open.values()))


# Names of the queues in `describe`. All other stages are "prefilling".
_QUEUES: Mapping[RequestStage, str] = {
    RequestStage.BOOTSTRAP: "bootstrap",
    RequestStage.INFLIGHT: "inflight",
}


class OutgoingHandoffs:
    """The hand-offs that this node gives. Engine thread only.

    The watchdog may call `describe` while that thread is stalled.

    Attributes:
        counts: hand-offs by outcome, and rejections by reason.
    """

    def __init__(
        self,
        admission: HandoffAdmission,
        *,
        queues: PrefillQueues,
        history: HandoffHistory,
        pages: PageAllocator,
        tables: PageTables,
        port: ProducerCommands,
        sharing: PrefixSharing,
        embeddings: EmbeddingReads,
    ) -> None:
        self._admission = admission
        self._queues = queues
        self.history = history
        self._pages = pages
        self._tables = tables
        self._port = port
        self._sharing = sharing
        self._embeddings = embeddings
        self._states: dict[int, PrefillState] = {}  # by serial, without failed hand-offs
        self._exported: dict[int, Ints] = {}  # pages held for publication, by serial
        outcomes = ("handoffs_completed", "handoffs_failed", "handoffs_aborted", "refused/dropped")
        self.counts = dict.fromkeys((*outcomes, *COUNTS), 0)

    @property
    def busy(self) -> bool:
        return bool(self._states or self._exported)

    @property
    def exported(self) -> Sequence[Ints]:
        """Pages held for publication, one array per hand-off."""
        return tuple(self._exported.values())

    def find(self, request: Request) -> PrefillState | None:
        """Return the state of a request whose hand-off has not failed."""
        return self._states.get(request.key)

    def describe(self) -> list[dict[str, object]]:
        """Return the log fields of each hand-off: its queue, its request and its age."""
        now = time.monotonic()
        return [
            {
                "queue": _QUEUES.get(state.stage, "prefilling"),
                "request_id": state.request.spec.request_id,
                "serial": state.key,
                "tokens": len(state.request.token_ids),
                "open_s": now - state.request.arrived,
            }
            for state in tuple(self._states.values())
        ]

    def open(self, event: OpenedEvent) -> None:
        now, source = time.monotonic(), event.source
        assert isinstance(source, Prompt | Live)  # PrefixSharing handles the other sources
        timings = self.history.open(event, source.spec, now)
        request = self._admission.create_request(event, source.spec, now)
        state = PrefillState(request=request, on_end=self._ended, timings=timings)
        self._states[state.key] = state
        try:
            self._admission.admit(state, event, self._queues.num_waiting)
        except ServingError as error:
            return state.close(error)
        self._queues.bootstrap.put(state)
        state.claims.add(Claim.FETCH, partial(self._sharing.forget, state.key))
        if isinstance(source, Prompt) and source.encode_addresses:
            state.claims.add(Claim.IMAGES, partial(self._embeddings.forget, state.key))
            self._embeddings.start(
                state.key, source.spec.images, source.encode_addresses, timings.images
            )
        if isinstance(source, Prompt) and source.prefix_hints:
            scheduled = self._queues.scheduled
            room, queued_s = (
                scheduled.scheduler.free_capacity().num_pages,
                scheduled.backlog.queued_s,
            )
            self._sharing.fetch(request, source.prefix_hints, room=room, queued_s=queued_s)

    def grant(self, event: GrantedEvent) -> None:
        state = self._states.get(event.serial)
        if state is None:
            return  # it failed before the grant arrived, and ClosedEvent will follow
        request, timings, now = state.request, state.timings, time.monotonic()
        timings.granted, timings.prefix_tokens = now, event.prefix_tokens
        state.prefix_tokens = state.published = event.prefix_tokens
        backlog = self._queues.scheduled.backlog
        entry = QueueEntry(request.due, len(request.token_ids), request.spec.priority)
        backlog.join(state.key, entry, now)
        state.claims.add(Claim.BACKLOG, partial(backlog.leave, state.key))
        self._queues.bootstrap.take(state)
        try:
            self._queues.preparing.put(state)
        except ServingError as error:
            state.close(error)

    def schedule_prepared(self, now: float) -> None:
        """Schedule prepared requests, and reject those whose preparation failed."""
        for state, failure in self._queues.preparing.ready(now):
            try:
                if failure is not None:
                    raise failure
                self._queues.scheduled.put(state)
            except ServingError as error:
                state.close(error)

    def admitted(self, request: Request, holding: PageHolding) -> None:
        """Publish the cached pages of a prompt for which the scheduler has reserved all pages."""
        state = self._states[request.key]
        state.holding = holding
        num_tokens = len(request.token_ids)
        exported = holding.pages_of(self._tables.handed_over(num_tokens, state.prefix_tokens))
        state.claims.release(Claim.TOKENS)
        self._sharing.admitted(request)
        timings = state.timings
        timings.admitted, timings.cached_tokens = request.admitted, request.cached_tokens
        timings.loads, timings.encoded = request.loads, request.encoded
        self._pages.hold(exported, PageHolder.PUBLICATION)
        self._exported[state.key] = exported
        # Tokens computed ahead count as computed.
        cached_tokens = int(min(request.cached_tokens, state.cached_before))
        self._port.post(
            AdmittedCommand(
                state.key,
                compute_tokens=num_tokens - cached_tokens,
                queued_tokens=self._queues.scheduled.scheduler.queued_tokens(),
            )
        )
        # Only whole pages: the cache may also have generated tokens, but only the prompt counts.
        self._publish(state, self._whole_pages(request.cached_tokens))

    def computed(self, chunk: ChunkDone) -> None:
        state = self._states.get(chunk.request.key)
        if state is None:
            return
        state.timings.num_chunks += 1
        num_left = len(chunk.request.token_ids) - chunk.end
        self._queues.scheduled.backlog.serve(state.key, num_left)
        self._sharing.sources.computing.serve(state.key, num_left)
        if chunk.first_token is None:
            self._publish(state, self._whole_pages(chunk.end))
            return
        self._queues.inflight.put(state)
        state.claims.release(Claim.ADAPTER)
        state.timings.done = time.monotonic()
        output = SampledOutput(
            chunk.first_token,
            times=state.timings.times(),
            logprobs=chunk.logprobs,
            prompt_logprobs=chunk.prompt_logprobs,
        )
        self._publish(state, chunk.end, output)

    def closed(self, event: ClosedEvent) -> None:
        """Remove a hand-off that is completed, cancelled or failed."""
        self.counts["handoffs_completed" if event.completed else "handoffs_failed"] += 1
        self.history.close(event)
        state = self._states.pop(event.serial, None)
        if state is not None:
            _stop(state, event.reason)
        exported = self._exported.pop(event.serial, None)
        if exported is not None:
            self._pages.drop(exported, PageHolder.PUBLICATION)

    def abort(self, request_id: str) -> int:
        """Cancel all hand-offs of this client request. Returns their number."""
        return self._fail_if(
            lambda state: state.request.spec.request_id == request_id,
            "aborted by an operator",
            retryable=False,
        )

    def fail_all(self, reason: str) -> None:
        """Fail all hand-offs except computed ones, whose pages are read to the end."""
        self._fail_if(
            lambda state: state.stage is not RequestStage.INFLIGHT, reason, retryable=True
        )

    def _fail_if(
        self, chosen: Callable[[PrefillState], bool], reason: str, *, retryable: bool
    ) -> int:
        """Fail the chosen hand-offs. Returns their number."""
        doomed = [state for state in self._states.values() if chosen(state)]
        for state in doomed:
            self._report_failure(state, reason, retryable=retryable)
            _stop(state, reason)
        return len(doomed)

    def _publish(self, state: PrefillState, end: int, output: SampledOutput | None = None) -> None:
        """Publish the tokens [state.published, end), page-aligned unless it is the last range.

        Nothing is published while `end` is inside the prefix that the consumer already has. The
        last range carries the first token, so it is published even if it is empty.
        """
        start, last = state.published, output is not None
        if end <= start and not last:
            return
        if last and start == state.prefix_tokens:  # the only range has all exported pages
            pages = self._exported[state.key]
        else:
            assert state.holding is not None  # the scheduler has admitted it
            num_tokens = len(state.request.token_ids)
            spans = self._tables.spans(num_tokens, state.prefix_tokens, start, end, last=last)
            pages = state.holding.pages_of(spans)
        self._port.post(PublishCommand(state.key, start, end, pages, last, output))
        state.published = end

    def _whole_pages(self, num_tokens: int) -> int:
        return num_tokens // self._tables.page_size * self._tables.page_size

    def _ended(self, state: PrefillState, ending: Ending) -> None:
        """Fail the hand-off of an ended request, unless its failure is already reported."""
        if state.key not in self._states:
            return
        if isinstance(ending, ServingError):
            why, reason, retry_after_s = rejection_of(ending), str(ending), ending.late_s
            self.counts[f"refused/{why}"] += 1
            retryable = why != "invalid"
        else:
            # Only a request that waited too long has a retry delay.
            self.counts["refused/dropped"] += ending.retry_after_s > 0.0
            retryable, retry_after_s = False, ending.retry_after_s
            reason = ending.error or ending.reason.name.lower()
        self._report_failure(state, reason, retryable=retryable, retry_after_s=retry_after_s)

    def _report_failure(
        self, state: PrefillState, reason: str, *, retryable: bool, retry_after_s: float = 0.0
    ) -> None:
        del self._states[state.key]
        self.counts["handoffs_aborted"] += 1
        self._port.post(FailCommand(state.key, reason, retryable, retry_after_s))


def _stop(state: PrefillState, reason: str) -> None:
    """Stop a request whose end is already reported, after its launched chunk if it has one."""
    end = RequestEnd(FinishReason.ABORT, reason)
    assert state.queue is not None
    state.queue.remove(state, end)
    state.close(end)
