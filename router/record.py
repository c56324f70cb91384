"""The record of one request: it feeds metrics, the timeline and the request log."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from types import TracebackType

import msgspec

from common.errors import (
    InvalidRequest,
    Overloaded,
    QueueFull,
    RateLimited,
    RequestAborted,
    ServingError,
)
from common.logs import ThrottledLog, kv
from common.requests.timeline import MAX_TEXT, NOTHING, Timeline, from_proto, split_ttft
from common.tracing.context import UNTRACED, ChildSpan, TraceContext, Tracer, checked
from protos import decode_pb2
from router.metrics import Rejection, RouterMetrics

log = logging.getLogger(__name__)

# The first class that matches an error gives the reason.
_REJECTIONS: Sequence[tuple[type[ServingError], Rejection]] = (
    (InvalidRequest, "invalid"),
    (RateLimited, "limited"),
    (QueueFull, "late"),
    (Overloaded, "overloaded"),
    (ServingError, "no_node"),
)
NUM_KEPT = 256  # timelines of ended requests
NUM_FAILED_KEPT = 64  # further timelines of requests that failed or were replayed
MAX_BYTES = 32 << 10  # limit of a node's timeline; longer ones are ignored


class AttemptTimings(msgspec.Struct, eq=False):
    """Times of one submission to a decode node, in time.monotonic() seconds. 0.0: not yet."""

    decode: str  # address of the decode node
    submitted: float
    lost: float = 0.0
    because: str = ""  # reason why the node was lost
    num_tokens: int = 0  # length of the response at the submission
    moved: bool = False  # live migration: the previous node ran until this one was ready
    received: float = 0.0  # when its timeline arrived
    # Copied, because the received message would keep its whole Step in memory.
    message: decode_pb2.Timeline | None = None
    read: Timeline | None = None  # parsed from `message` at first use

    def receive(self, message: decode_pb2.Timeline) -> None:
        self.received = time.monotonic()
        content = message.SerializeToString()
        if len(content) <= MAX_BYTES:
            self.message = decode_pb2.Timeline.FromString(content)

    @property
    def timeline(self) -> Timeline:
        if self.message is None:
            return NOTHING
        if self.read is None:
            self.read = from_proto(self.message, self.received - self.submitted)
        return self.read

    def begin(self, timeline: Timeline, first_token: float) -> float:
        """Return the zero of the node's timeline, in time.monotonic() of this router.

        Unaccounted time is split equally before and after, but no token may arrive before it was
        sent.
        """
        length = max((row.end for row in timeline.intervals), default=0.0)
        slack = max(self.received - self.submitted - length, 0.0)
        if timeline.first_token is not None and first_token > self.submitted:
            seen = first_token - self.submitted - timeline.first_token
            slack = min(slack, max(2 * seen, 0.0))
        return self.submitted + slack / 2


class RequestTimeline(msgspec.Struct, eq=False):
    """Timeline of one request as this router sees it. Written by the request's RequestRecord."""

    request_id: str
    label: str  # request id from the client, or empty
    trace: TraceContext
    arrived_unix: float
    arrived: float
    on_late_timeline: "Callable[[RequestTimeline], None]"  # called if one comes after the end
    model: str  # name of the served model
    tokenized: float = 0.0
    first_token: float = 0.0  # when it was written to the client
    last_token: float = 0.0
    ended: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    outcome: str = "live"
    error: str = ""
    submissions: list[AttemptTimings] = []

    def receive(self, one: AttemptTimings, message: decode_pb2.Timeline) -> None:
        one.receive(message)
        if self.ended and one is self.giver():
            self.on_late_timeline(self)

    def submit(self, decode: str) -> AttemptTimings:
        now = time.monotonic()
        self.submissions.append(AttemptTimings(decode, now, num_tokens=self.completion_tokens))
        return self.submissions[-1]

    def move(self, to: AttemptTimings) -> None:
        """Record that the request has migrated to the node of the submission `to`."""
        last = self.submissions[-1]
        last.lost, last.because = time.monotonic(), "moved"
        to.moved = True
        self.submissions.append(to)

    @property
    def num_moves(self) -> int:
        return sum(one.moved for one in self.submissions)

    @property
    def num_replays(self) -> int:
        return max(len(self.submissions) - 1 - self.num_moves, 0)

    def lose(self, because: str) -> None:
        """Record that the decode node of the last submission is lost."""
        last = self.submissions[-1]
        last.lost, last.because = time.monotonic(), because[:MAX_TEXT]

    def split(self) -> tuple[float, ...] | None:
        """Return the time to first token in seconds, split by TtftPhase. None if unknown."""
        giver = self.giver()
        if giver is None or giver.message is None:
            return None
        return split_ttft(
            giver.message,
            tokenize_s=self.tokenized - self.arrived,
            place_s=giver.submitted - self.tokenized,
            ttft_s=self.first_token - self.arrived,
        )

    def router_phases(self) -> Iterator[tuple[str, float, float]]:
        """Yield name, start and end of each phase, ordered by start. Phases in progress end now."""
        now = self.ended or time.monotonic()
        yield "tokenize", self.arrived, self.tokenized or now
        begun = self.tokenized
        after = [*(one.moved for one in self.submissions[1:]), False]
        for one, moves in zip(self.submissions, after, strict=True):
            if not one.moved:
                yield "place", begun, one.submitted
            if one.lost and not moves:
                yield "lost_node", one.submitted, one.lost
            begun = one.lost
        if begun and not (self.ended and self.submissions):
            yield "place", begun, now
        if self.first_token:
            yield "stream", self.first_token, self.last_token if self.ended else now

    def giver(self) -> AttemptTimings | None:
        """Return the submission whose node produced the first token."""
        if not self.first_token:
            return None
        until = [one for one in self.submissions if not one.lost or one.lost >= self.first_token]
        return until[0] if until else None


class RequestRecords:
    """Records of the requests to one model, with recent timelines. For one event loop."""

    def __init__(self, metrics: RouterMetrics, tracer: Tracer | None, model: str = "") -> None:
        self.metrics = metrics
        self.refusals = ThrottledLog(log)  # limited, because any client can cause many
        self._model = model
        self._tracer = tracer
        self._live: dict[str, RequestTimeline] = {}
        self._ended: deque[RequestTimeline] = deque()
        self._failed: deque[RequestTimeline] = deque(maxlen=NUM_FAILED_KEPT)

    def __iter__(self) -> Iterator[RequestTimeline]:
        """Iterate newest first, active requests before ended ones."""
        yield from reversed(self._live.values())
        yield from reversed(self._ended)
        yield from reversed(self._failed)

    def find(self, name: str) -> RequestTimeline | None:
        """Return the request with that id, or else the newest one with that label."""
        labelled = None
        for each in self:
            if each.request_id == name:
                return each
            if labelled is None and each.label == name:
                labelled = each
        return labelled

    def begin(self, request_id: str, label: str, client: str, traceparent: str) -> "RequestRecord":
        """Begin the record of a request.

        Args:
            label: request id from the client, or empty. Not necessarily unique.
            traceparent: header from the client, or empty. Ignored if it is invalid.
        """
        parent = checked(traceparent)
        trace = UNTRACED
        if self._tracer is not None:
            trace = self._tracer.enter(parent, root=True)
        elif parent:
            trace = TraceContext(parent)
        now = time.monotonic()
        timeline = RequestTimeline(
            request_id, label, trace, time.time(), now, self._count, self._model
        )
        return RequestRecord(self, timeline, client)

    def accept(self, timeline: RequestTimeline) -> None:
        """List the request as active."""
        self._live[timeline.request_id] = timeline

    def end(self, timeline: RequestTimeline, outcome: str, error: str) -> None:
        """End the timeline of an accepted or rejected request."""
        timeline.ended = time.monotonic()
        timeline.outcome, timeline.error = outcome, error[:MAX_TEXT]
        if self._live.get(timeline.request_id) is timeline:
            del self._live[timeline.request_id]
            self._keep(timeline)
            self._count(timeline)
        if self._tracer is not None and timeline.trace.own:
            self._trace(self._tracer, timeline)

    def _keep(self, timeline: RequestTimeline) -> None:
        self._ended.append(timeline)
        if len(self._ended) > NUM_KEPT:
            oldest = self._ended.popleft()
            if oldest.outcome == "error" or len(oldest.submissions) > 1:
                self._failed.append(oldest)

    def _count(self, timeline: RequestTimeline) -> None:
        parts = timeline.split()
        if parts is not None:
            self.metrics.ttft_split(parts)

    def _trace(self, tracer: Tracer, timeline: RequestTimeline) -> None:
        tracer.record(
            timeline.trace,
            "baton.request",
            begun=timeline.arrived,
            ended=timeline.ended,
            children=[
                ChildSpan(name, start, end, {}) for name, start, end in timeline.router_phases()
            ],
            attributes={
                "baton.request_id": timeline.request_id[:MAX_TEXT],
                "baton.label": timeline.label[:MAX_TEXT],
                "baton.outcome": timeline.outcome,
                "gen_ai.request.model": timeline.model[:MAX_TEXT],
                "baton.replays": timeline.num_replays,
                "baton.moves": timeline.num_moves,
                "baton.time_to_first_token_s": (
                    timeline.first_token - timeline.arrived if timeline.first_token else 0.0
                ),
                "gen_ai.usage.input_tokens": timeline.prompt_tokens,
                "gen_ai.usage.output_tokens": timeline.completion_tokens,
            },
            error=timeline.error if timeline.outcome == "error" else "",
        )


class AllTimelines:
    """Timelines of the requests to all models. For one event loop."""

    def __init__(self, recorders: Sequence[RequestRecords]) -> None:
        self._recorders = recorders

    def __iter__(self) -> Iterator[RequestTimeline]:
        """Iterate over the models, each in the order of its RequestRecords."""
        return chain.from_iterable(self._recorders)

    def find(self, name: str) -> RequestTimeline | None:
        """Return the request with that id, or else the newest one with that label."""
        found = [one for each in self._recorders if (one := each.find(name)) is not None]
        return max(found, key=lambda one: (one.request_id == name, one.arrived), default=None)


class RequestRecord:
    """Context around one request, made by `RequestRecords.begin`. Leaving it ends the request."""

    def __init__(self, records: RequestRecords, timeline: RequestTimeline, client: str) -> None:
        self.timeline = timeline
        self._records = records
        self._metrics = records.metrics
        self._client = client
        self._accepted = False
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
            self._records.end(timeline, "error", str(error))
            return
        outcome = self._finish_reason if error is None else self._failure(error)
        shown = "error" if outcome in ("invalid", "overloaded") else outcome
        self._records.end(timeline, shown, str(error or ""))
        seconds = time.monotonic() - timeline.arrived
        self._metrics.ended(outcome, seconds)
        if log.isEnabledFor(logging.INFO):
            fields: dict[str, object] = {
                **self._names(),
                "outcome": outcome,
                "tokens": self.timeline.completion_tokens,
                "seconds": seconds,
                "client": self._client,
            }
            if isinstance(error, Exception):
                decodes = [submission.decode for submission in self.timeline.submissions[-1:]]
                fields |= {**({"decode": decodes[0]} if decodes else {}), "error": error}
            log.info("request ended %s", kv(**fields))

    def _failure(self, error: BaseException) -> str:
        """Return the outcome of an accepted request that failed, as in `baton_requests_total`.

        A node may still reject the request before its first token. Such rejections are no errors:
        clients can cause any number of them by schemas or load.
        """
        if isinstance(error, asyncio.CancelledError | RequestAborted):
            return "cancelled"
        if not self.timeline.completion_tokens:
            if isinstance(error, InvalidRequest):
                return "invalid"
            if isinstance(error, Overloaded):
                return "overloaded"
        return "error"

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
        """Record that the request is about to be sent to a prefill node only."""
        self._accepted = True
        self._metrics.accepted(num_prompt_tokens)
        self.timeline.prompt_tokens = num_prompt_tokens
        self._records.accept(self.timeline)

    def replay(self, decode: str, lost: ServingError, *, quarantined: bool) -> AttemptTimings:
        """Record that another node continues the request after a failure. Returns the timings of
        the submission.

        Args:
            quarantined: the request is quarantined and runs alone.
        """
        self._metrics.replayed(quarantined=quarantined)
        log.warning(
            "request replayed %s",
            kv(
                **self._names(),
                tokens=self.timeline.completion_tokens,
                decode=decode,
                alone=quarantined,
                reason=lost,
            ),
        )
        return self.timeline.submit(decode)

    def move(self, to: AttemptTimings) -> None:
        self._metrics.moved(moved=True)
        self.timeline.move(to)
        log.info(
            "request migrated %s",
            kv(**self._names(), tokens=self.timeline.completion_tokens, decode=to.decode),
        )

    def stay(self, decode: str, because: ServingError) -> None:
        """Record that a live migration to that decode node has failed."""
        self._metrics.moved(moved=False)
        log.info("migration failed %s", kv(**self._names(), decode=decode, reason=because))

    def write(self, num_tokens: int) -> None:
        """Record that a message with `num_tokens` tokens is sent to the client now."""
        now, timeline = time.monotonic(), self.timeline
        self._metrics.tokens(num_tokens)
        num_next, waited_s = num_tokens, now - timeline.last_token
        if num_tokens and not timeline.completion_tokens:
            self._metrics.first_token(now - timeline.arrived)
            timeline.first_token = now
            num_next, waited_s = num_tokens - 1, 0.0  # the other tokens arrived with the first one
        if num_next:
            self._metrics.next_token(waited_s / num_next, num_next)
        timeline.last_token = now
        timeline.completion_tokens += num_tokens

    def finish(self, finish_reason: str, cached_tokens: int) -> None:
        """Record the finish reason "stop", "length" or "pooled"."""
        self._finish_reason = finish_reason
        self.timeline.cached_tokens = cached_tokens

    def _refuse(self, error: BaseException | None) -> None:
        if not isinstance(error, Exception):
            return
        # Another exception is a bug: its traceback is logged elsewhere, without the request's data.
        if isinstance(error, ServingError):
            reason = next(reason for kind, reason in _REJECTIONS if isinstance(error, kind))
            self._metrics.rejected(reason)
        self._records.refusals.info(
            "request rejected", **self._names(), client=self._client, reason=error
        )

    def _names(self) -> dict[str, object]:
        """Return the fields of every log line about the request."""
        return {
            "request_id": self.timeline.request_id,
            **({"label": self.timeline.label} if self.timeline.label else {}),
            **self.timeline.trace.log_fields,
        }
