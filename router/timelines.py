"""Timelines of this router's active requests and of the last ended ones.

Each timeline is reported in full when its request ends: to the metrics, and as spans if it is
traced. A request that its client leaves or a stop string ends is finished before its decode node
has sent its timeline. The timeline is still accepted then.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import msgspec

from common.requests.timeline import MAX_TEXT, NOTHING, Timeline, from_proto, split_ttft
from common.tracing.context import UNTRACED, ChildSpan, TraceContext, Tracer, checked
from protos import decode_pb2
from router.metrics import RouterMetrics

NUM_KEPT = 256  # ended requests
NUM_FAILED_KEPT = 64  # older requests that failed or were replayed
MAX_BYTES = 32 << 10  # of a timeline; longer ones are ignored


class AttemptTimings(msgspec.Struct, eq=False):
    """A submission to one decode node. Times are time.monotonic(). 0.0 is "not yet"."""

    decode: str  # address
    submitted: float
    lost: float = 0.0
    because: str = ""  # reason of the loss
    num_tokens: int = 0  # tokens of the response at the submission
    moved: bool = False  # migration: the previous node ran on until this one was ready
    received: float = 0.0  # when its timeline arrived
    # A copy: the received message would keep its whole Step in memory.
    message: decode_pb2.Timeline | None = None
    read: Timeline | None = None  # parsed from `message` at the first use

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
        """Return the timeline's zero on this router's clock.

        Unaccounted time counts half before and half after, and no token arrives before it was sent.
        """
        length = max((row.end for row in timeline.intervals), default=0.0)
        slack = max(self.received - self.submitted - length, 0.0)
        if timeline.first_token is not None and first_token > self.submitted:
            seen = first_token - self.submitted - timeline.first_token
            slack = min(slack, max(2 * seen, 0.0))
        return self.submitted + slack / 2


class RequestTimeline(msgspec.Struct, eq=False):
    """Timeline of one request, as this router sees it. Written by the request's own record."""

    request_id: str
    label: str  # the client's name for it, or empty
    trace: TraceContext
    arrived_unix: float
    arrived: float
    on_late_timeline: "Callable[[RequestTimeline], None]"  # called if it comes after the end
    model: str  # name of the served model
    tokenized: float = 0.0
    first_token: float = 0.0  # written to the client
    last_token: float = 0.0
    ended: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    outcome: str = "live"
    error: str = ""
    submissions: list[AttemptTimings] = []

    def receive(self, one: AttemptTimings, message: decode_pb2.Timeline) -> None:
        """Store the timeline that the decode node of this submission has sent."""
        one.receive(message)
        if self.ended and one is self.giver():
            self.on_late_timeline(self)

    def submit(self, decode: str) -> AttemptTimings:
        now = time.monotonic()
        self.submissions.append(AttemptTimings(decode, now, num_tokens=self.completion_tokens))
        return self.submissions[-1]

    def move(self, to: AttemptTimings) -> None:
        """Continue at another decode node, where the request was submitted before."""
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
        """Record that the decode node of the last submission has lost the request."""
        last = self.submissions[-1]
        last.lost, last.because = time.monotonic(), because[:MAX_TEXT]

    def split(self) -> tuple[float, ...] | None:
        """Return the time to first token by TtftPhase, or None if it is not known."""
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
        """Yield name, start and end, ordered by start. Phases in progress end now."""
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


class TimelineRecorder:
    """Timelines of all requests to one model. For one event loop.

    Args:
        model: its name.
    """

    def __init__(self, metrics: RouterMetrics, tracer: Tracer | None, model: str = "") -> None:
        self._metrics = metrics
        self._model = model
        self._tracer = tracer
        self._live: dict[str, RequestTimeline] = {}
        self._ended: deque[RequestTimeline] = deque()
        self._failed: deque[RequestTimeline] = deque(maxlen=NUM_FAILED_KEPT)

    def __iter__(self) -> Iterator[RequestTimeline]:
        """Iterate newest first, active requests before all others."""
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

    def begin(self, request_id: str, traceparent: str = "", label: str = "") -> RequestTimeline:
        """Start a timeline.

        Args:
            request_id: unique.
            traceparent: as the client sent it. Ignored if it is invalid.
            label: the client's name for it. Not necessarily unique.
        """
        parent = checked(traceparent)
        trace = UNTRACED
        if self._tracer is not None:
            trace = self._tracer.enter(parent, root=True)
        elif parent:
            trace = TraceContext(parent)
        now = time.monotonic()
        return RequestTimeline(request_id, label, trace, time.time(), now, self._count, self._model)

    def accept(self, timeline: RequestTimeline) -> None:
        """List the request as active."""
        self._live[timeline.request_id] = timeline

    def end(self, timeline: RequestTimeline, outcome: str, error: str) -> None:
        """End the timeline of an accepted or a rejected request."""
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
            self._metrics.ttft_split(parts)

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
    """Timelines of all requests of a router. For one event loop."""

    def __init__(self, recorders: Sequence[TimelineRecorder]) -> None:
        self._recorders = recorders

    def __iter__(self) -> Iterator[RequestTimeline]:
        """Iterate over the models, each in the order of its TimelineRecorder."""
        return chain.from_iterable(self._recorders)

    def find(self, name: str) -> RequestTimeline | None:
        """Return the request with that id, or else the newest one with that label."""
        found = [one for each in self._recorders if (one := each.find(name)) is not None]
        return max(found, key=lambda one: (one.request_id == name, one.arrived), default=None)
