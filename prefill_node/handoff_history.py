"""Timings of the hand-offs of a prefill node, including recently ended ones."""

import logging
import time
from collections.abc import Callable

from common.logs.throttle import Throttle, ThrottledLog
from common.request import RequestSpec
from common.requests.request_trace import RequestTrace, RequestTraces
from common.tracing.context import is_sampled, log_fields
from kvtransfer.ports import ClosedEvent, OpenedEvent
from node.messages import HandoffSpan
from node.request_history import RequestHistory
from node.request_traces import of_handoff
from node.timings import ProducerTimings

log = logging.getLogger(__name__)


class HandoffHistory:
    """Records by serial, from OpenedEvent to ClosedEvent, and the last ended ones by request.

    Engine thread only. The watchdog reads it when that thread is stalled.

    Args:
        tell: sends hand-offs of traced requests to the frontend.
    """

    def __init__(self, tell: Callable[[HandoffSpan], None]) -> None:
        self._log = ThrottledLog(log, Throttle(most=100))
        self._tell = tell
        self._open: dict[int, ProducerTimings] = {}
        self._ended = RequestHistory(ProducerTimings)

    def open(self, event: OpenedEvent, spec: RequestSpec, now: float) -> ProducerTimings:
        """Start the timings of a hand-off."""
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
        if not event.held:
            self._log.info(
                "hand-off dropped",
                request_id=stamps.request_id,
                **log_fields(stamps.traceparent),
                id=tuple(event.id),
                reason=event.reason,
            )
        stamps.dropped, stamps.held, stamps.reason = time.monotonic(), event.held, event.reason
        self._ended.record(stamps, failed=not event.held)
        if is_sampled(stamps.traceparent):
            self._tell(HandoffSpan(stamps))

    def explain(self, request_id: str) -> RequestTraces:
        """Return the traces of the hand-offs of a client's request."""
        found = [
            *self._ended.find(request_id),
            *(each for each in tuple(self._open.values()) if each.request_id == request_id),
        ]
        now = time.monotonic()
        return RequestTraces(tuple(of_handoff(each, now) for each in found), len(self._ended))

    def flights(self, num_ended: int) -> list[tuple[str, RequestTrace]]:
        """Return request ids and traces of the last ended hand-offs and of all open ones."""
        now = time.monotonic()
        return [
            (stamps.request_id, of_handoff(stamps, now))
            for stamps in (*self._ended.last(num_ended), *tuple(self._open.values()))
        ]
