"""The record of one request, for metrics, timelines and the log."""

import asyncio
import logging
import time
from types import TracebackType

from common.errors import (
    InvalidRequest,
    Overloaded,
    QueueFull,
    RateLimited,
    RequestAborted,
    ServingError,
)
from common.logs import Throttle, ThrottledLog, kv
from router.metrics import RouterMetrics
from router.timelines import AttemptTimings, TimelineRecorder

log = logging.getLogger(__name__)


class RequestRecords:
    """Destinations of all request records. For one event loop."""

    def __init__(self, metrics: RouterMetrics, timelines: TimelineRecorder) -> None:
        self.metrics = metrics
        self.timelines = timelines
        self.refusals = ThrottledLog(log, Throttle())  # any client can cause many

    def begin(self, request_id: str, label: str, client: str, traceparent: str) -> "RequestRecord":
        """Begin the record of a request.

        Args:
            label: the client's name for it, or empty.
            client: name of the client.
            traceparent: the header as the client sent it, or empty.
        """
        return RequestRecord(self, request_id, label, client, traceparent)


class RequestRecord:
    """A context around one request, made by `RequestRecords.begin`. Leaving it ends the request."""

    def __init__(
        self, records: RequestRecords, request_id: str, label: str, client: str, traceparent: str
    ) -> None:
        self._metrics = records.metrics
        self._timelines = records.timelines
        self._refusals = records.refusals
        self._client = client
        self.timeline = self._timelines.begin(request_id, traceparent, label)
        self._arrived_at = self.timeline.arrived
        self._wrote_at = self._arrived_at
        self._accepted = False
        self._num_tokens = 0
        self._finish_reason = "error"

    def __enter__(self) -> "RequestRecord":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        timeline = self.timeline
        if not self._accepted:
            self._refuse(error)
            self._timelines.end(timeline, "error", str(error))
            return
        outcome = _outcome(error) if error else self._finish_reason
        self._timelines.end(timeline, outcome, str(error or ""))
        seconds = time.monotonic() - self._arrived_at
        self._metrics.ended(outcome, seconds)
        if log.isEnabledFor(logging.INFO):
            fields: dict[str, object] = {
                **self._names(),
                "outcome": outcome,
                "tokens": self._num_tokens,
                "seconds": seconds,
                "client": self._client,
            }
            if isinstance(error, Exception):
                decodes = [submission.decode for submission in self.timeline.submissions[-1:]]
                fields |= {**({"decode": decodes[0]} if decodes else {}), "error": error}
            log.info("request ended %s", kv(**fields))

    def accept(self, num_prompt_tokens: int, decode: str) -> AttemptTimings:
        """Record that the request is about to be submitted to a decode node.

        Returns the timings of the submission.
        """
        timings = self.timeline.submit(decode)
        self.place(num_prompt_tokens)
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "request accepted %s",
                kv(**self._names(), prompt_tokens=num_prompt_tokens, decode=decode),
            )
        return timings

    def place(self, num_prompt_tokens: int) -> None:
        """Record that the request is about to be sent to nodes, without a decode node so far."""
        self._accepted = True
        self._metrics.accepted(num_prompt_tokens)
        self.timeline.prompt_tokens = num_prompt_tokens
        self._timelines.accept(self.timeline)

    def replay(self, decode: str, lost: ServingError, *, quarantined: bool) -> AttemptTimings:
        """Record that another node continues the request after a failure.

        Returns the timings of the submission. `quarantined`: it is quarantined, and runs alone.
        """
        self._metrics.replayed(quarantined=quarantined)
        log.warning(
            "request replayed %s",
            kv(
                **self._names(),
                tokens=self._num_tokens,
                decode=decode,
                alone=quarantined,
                reason=lost,
            ),
        )
        return self.timeline.submit(decode)

    def move(self, to: AttemptTimings) -> None:
        """Record that the request has migrated to another decode node."""
        self._metrics.moved(moved=True)
        self.timeline.move(to)
        log.info(
            "request migrated %s", kv(**self._names(), tokens=self._num_tokens, decode=to.decode)
        )

    def stay(self, decode: str, because: ServingError) -> None:
        """Record that a migration to that decode node has failed."""
        self._metrics.moved(moved=False)
        log.info("migration failed %s", kv(**self._names(), decode=decode, reason=because))

    def write(self, num_tokens: int) -> None:
        """Record that a message with that many tokens is sent to the client now."""
        now = time.monotonic()
        self._metrics.tokens(num_tokens)
        num_next, waited_s = num_tokens, now - self._wrote_at
        if num_tokens and not self._num_tokens:
            self._metrics.first_token(now - self._arrived_at)
            self.timeline.first_token = now
            num_next, waited_s = num_tokens - 1, 0.0  # the other tokens arrived with the first one
        if num_next:
            self._metrics.next_token(waited_s / num_next, num_next)
        self._wrote_at = self.timeline.last_token = now
        self._num_tokens += num_tokens
        self.timeline.completion_tokens = self._num_tokens

    def finish(self, finish_reason: str, cached_tokens: int) -> None:
        """Record the finish reason "stop", "length" or "pooled"."""
        self._finish_reason = finish_reason
        self.timeline.cached_tokens = cached_tokens

    def _refuse(self, error: BaseException | None) -> None:
        match error:
            case InvalidRequest():
                self._metrics.rejected("invalid")
            case RateLimited():
                self._metrics.rejected("limited")
            case QueueFull():
                self._metrics.rejected("late")
            case Overloaded():
                self._metrics.rejected("overloaded")
            case ServingError():
                self._metrics.rejected("no_node")
            case Exception():
                pass  # a bug: its traceback is logged elsewhere, without the request
            case _:
                return
        self._refusals.info("request rejected", **self._names(), client=self._client, reason=error)

    def _names(self) -> dict[str, object]:
        """Return the fields of every log line about the request."""
        return {
            "request_id": self.timeline.request_id,
            **({"label": self.timeline.label} if self.timeline.label else {}),
            **self.timeline.trace.log_fields,
        }


def _outcome(error: BaseException) -> str:
    match error:
        case asyncio.CancelledError() | RequestAborted():
            return "cancelled"
        case _:
            return "error"
