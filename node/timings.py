"""Timings of one request on a node, their conversion to readable events, and the history of ended
requests.

Timestamps are time.monotonic() of this host. 0.0 means "not yet". They are set as a request moves
between queues, never per token, and are sent to the frontend once, at the end. No decision depends
on them.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec

from common.requests.timeline import (
    MAX_ATTEMPTS,
    MAX_TEXT,
    HandoffSummary,
    Interval,
    Phase,
    PrefillTimes,
    RequestTrace,
    RequestTraces,
    Timeline,
    TimelineEvent,
)
from common.tracing.context import TraceContext


class HandoffTimings(msgspec.Struct, array_like=True, eq=False):
    """One attempt at a hand-off, on a decode node."""

    prefill: str  # address of the prefill node
    path: str
    opened: float
    granted: float = 0.0
    first_ready: float = 0.0
    first_token: float = 0.0
    landed: float = 0.0  # when its last page landed
    held: float = 0.0
    joined: float = 0.0
    lost: float = 0.0
    reason: str = ""
    times: PrefillTimes | None = None
    num_pages: int = 0
    num_bytes: int = 0

    @property
    def outcome(self) -> str:
        if self.lost:
            return "failed"
        return "completed" if self.held else "cancelled"


class RequestTimings(msgspec.Struct, array_like=True, eq=False):
    """One request on a decode node, from its Submit on."""

    request_id: str
    num_prompt: int
    trace: TraceContext
    received: float  # at the frontend
    accepted: float  # consumed by the engine thread
    attempts: list[HandoffTimings] = []
    queued: float = 0.0  # queued for a prefill on this node
    admitted: float = 0.0  # when its first forward pass here was chosen
    prefilled: float = 0.0  # on this node
    first_token: float = 0.0
    away: list[float] = []  # alternating: when it left the device, and when it returned
    ended: float = 0.0
    num_generated: int = 0  # including those that it arrived with
    unpaired: float = 0.0  # seconds of waiting for a prefill node to be paired again
    why_here: str = ""  # reason for a prefill on this node
    cached_tokens: int = 0  # tokens of its prompt that either node had cached
    end: str = ""  # how it ended
    # Alternating: when a load from an offload tier started, and when it ended.
    loads: list[float] = []
    encoded: list[float] = []  # when the encoding of its images started, and when it ended

    def open(self, attempt: HandoffTimings) -> None:
        """Add an attempt. Keeps the last MAX_ATTEMPTS."""
        self.attempts.append(attempt)
        del self.attempts[:-MAX_ATTEMPTS]

    def note_first_token(self, now: float) -> None:
        """Record the first token. No effect if repeated: a second prefill sends no first token."""
        self.first_token = self.first_token or now

    @property
    def had_trouble(self) -> bool:
        """Return whether a retraction or a failed hand-off may explain a delay."""
        return bool(self.away) or any(attempt.lost for attempt in self.attempts)

    def timeline(self) -> Timeline:
        """Return the timeline of an ended request."""
        zero, ended = self.received, self.ended
        rows = [Interval(Phase.DISPATCH, 0, 0.0, self.accepted - zero)]
        running = self.prefilled
        for number, attempt in enumerate(self.attempts, 1):
            rows += _of_attempt(attempt, number, attempt.lost or ended, zero)
            running = attempt.joined or running
        if self.queued:
            admitted = self.admitted if self.admitted >= self.queued else 0.0
            begun = (Phase.LOCAL_QUEUE, self.queued), (Phase.LOCAL_PREFILL, admitted)
            rows += _chain(begun, self.prefilled or ended, zero)
        if running:
            rows.append(Interval(Phase.RUNNING, 0, running - zero, ended - zero))
        returns = [*self.away[1::2], ended]
        rows += [
            Interval(Phase.RETRACTED, 0, out - zero, back - zero)
            for out, back in zip(self.away[::2], returns, strict=False)
        ]
        return Timeline(
            tuple(rows),
            tuple(_summary(attempt) for attempt in self.attempts),
            self.first_token - zero if self.first_token else None,
        )

    def events(self, now: float) -> RequestTrace:
        return _flight(_moments_of_request(self), self.received, now)


class ImageReads(msgspec.Struct, array_like=True, eq=False):
    """Reads of a request's images from encode nodes."""

    begun: float = 0.0
    ended: float = 0.0  # when the last read ended
    wanted: int = 0  # number of images
    completed: int = 0


class ProducerTimings(msgspec.Struct, array_like=True, eq=False):
    """One hand-off on a prefill node, from its Open on."""

    request_id: str
    num_prompt: int
    traceparent: str
    opened: float
    granted: float = 0.0
    admitted: float = 0.0  # when its first forward pass was chosen
    done: float = 0.0  # when its last chunk was done
    num_chunks: int = 0
    closed: float = 0.0
    attempt: int = 1  # attempt number of its consumer, for this request
    cached_tokens: int = 0  # cached on this node
    prefix_tokens: int = 0  # prefix that its consumer had
    completed: bool = False
    reason: str = ""  # why it failed
    loads: list[float] = []  # as RequestTimings.loads
    encoded: list[float] = []  # as RequestTimings.encoded
    images: ImageReads = msgspec.field(default_factory=ImageReads)

    def times(self) -> PrefillTimes:
        """Times of a hand-off whose last chunk is done."""
        return PrefillTimes(
            self.granted - self.opened,
            self.admitted - self.granted,
            self.done - self.admitted,
            self.num_chunks,
        )

    def timeline(self) -> Timeline:
        """Return the timeline of a closed hand-off."""
        begun = (
            (Phase.BOOTSTRAP_QUEUE, self.opened),
            (Phase.WAITING_QUEUE, self.granted),
            (Phase.PREFILL, self.admitted),
            (Phase.INFLIGHT_QUEUE, self.done),
        )
        return Timeline(tuple(_chain(begun, self.closed, self.opened)))

    def events(self, now: float) -> RequestTrace:
        return _flight(_moments_of_handoff(self), self.opened, now)


def _of_attempt(attempt: HandoffTimings, number: int, until: float, zero: float) -> list[Interval]:
    begun = (
        (Phase.PREALLOC_QUEUE, attempt.opened),
        (Phase.PREFILL_WAIT, attempt.granted),
        (Phase.TRANSFER, attempt.first_ready),
        (Phase.RELEASE, attempt.landed),
        (Phase.JOIN, attempt.held),
    )
    rows = _chain(begun, attempt.joined or until, zero, number)
    if attempt.times is not None:
        moments = (attempt.opened - zero, attempt.granted - zero, attempt.first_token - zero)
        rows += attempt.times.between(*moments, number)
    return rows


def _chain(
    begun: tuple[tuple[Phase, float], ...], until: float, zero: float, attempt: int = 0
) -> list[Interval]:
    """Return consecutive phases. Phases that never began are left out."""
    there = [(phase, start - zero) for phase, start in begun if start]
    ends = [*(start for _, start in there[1:]), until - zero]
    return [
        Interval(phase, attempt, start, end)
        for (phase, start), end in zip(there, ends, strict=True)
    ]


def _summary(attempt: HandoffTimings) -> HandoffSummary:
    return HandoffSummary(
        attempt.prefill,
        attempt.path,
        attempt.outcome,
        attempt.reason,
        attempt.num_pages,
        attempt.num_bytes,
        attempt.times.num_chunks if attempt.times else 0,
    )


KEPT_BYTES = 1 << 20
FAILED_BYTES = 256 << 10


S = TypeVar("S", bound=RequestTimings | ProducerTimings)


class _Kept(NamedTuple):
    request_id: str
    failed: bool
    stamps: bytes


class RequestHistory(Generic[S]):
    """Timings of the last ended requests on a node, for `Explain` and the watchdog.

    They are stored as bytes, within fixed limits whatever their content. Failed requests have a
    second ring, which keeps them longer. Engine thread only. The watchdog may read it while that
    thread is stalled.
    """

    def __init__(
        self, kind: type[S], *, kept_bytes: int = KEPT_BYTES, failed_bytes: int = FAILED_BYTES
    ) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._recent = _Ring(kept_bytes)
        self._failed = _Ring(failed_bytes)

    def __len__(self) -> int:
        return len(self._recent.rows) + len(self._failed.rows)

    def record(self, stamps: S, *, failed: bool) -> None:
        row = _Kept(stamps.request_id, failed, self._encoder.encode(stamps))
        for left in self._recent.put(row):
            if left.failed:
                self._failed.put(left)

    def find(self, request_id: str) -> Iterator[S]:
        """Yield the timings with that request id, oldest first."""
        for ring in (self._failed, self._recent):
            for row in ring.rows:
                if row.request_id == request_id:
                    yield self._decoder.decode(row.stamps)

    def last(self, number: int) -> list[S]:
        """Return the newest timings, oldest first."""
        rows = list(self._recent.rows)[-number:]
        return [self._decoder.decode(row.stamps) for row in rows]

    def explain(self, request_id: str, active: Iterable[S]) -> RequestTraces:
        """Return the traces of the requests with this id, among the ended and the `active` ones."""
        running = (each for each in active if each.request_id == request_id)
        now, found = time.monotonic(), [*self.find(request_id), *running]
        return RequestTraces(tuple(each.events(now) for each in found), len(self))

    def flights(self, num_ended: int, active: Iterable[S]) -> list[tuple[str, RequestTrace]]:
        """Return (request id, trace) of the last ended requests and of the `active` ones."""
        now, found = time.monotonic(), [*self.last(num_ended), *active]
        return [(each.request_id, each.events(now)) for each in found]


class _Ring:
    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self.rows: deque[_Kept] = deque()

    def put(self, row: _Kept) -> list[_Kept]:
        """Add a row. Returns the rows that it displaced."""
        self.rows.append(row)
        self._num_bytes += len(row.stamps)
        left = []
        while self._num_bytes > self._most_bytes:
            left.append(self.rows.popleft())
            self._num_bytes -= len(left[-1].stamps)
        return left


WHY_HERE = {
    "colocated": "this node computes all prompts itself",
    "short": "few uncached tokens",
    "no_prefill_node": "no candidate prefill node is paired with this node",
    "exhausted": "all hand-off attempts failed",
}


def _flight(moments: Iterator[TimelineEvent], zero: float, now: float) -> RequestTrace:
    """Return the events in order, relative to `zero`. `moments` and `zero` are time.monotonic().
    Events that have not happened are left out.
    """
    events = [
        TimelineEvent(event.at - zero, event.what, event.detail[:MAX_TEXT])
        for event in moments
        if event.at
    ]
    return RequestTrace(now - zero, tuple(sorted(events, key=lambda event: event.at)))


def _moments_of_request(stamps: RequestTimings) -> Iterator[TimelineEvent]:
    came = f"{stamps.num_prompt} prompt tokens"
    if stamps.num_generated:
        came += f" and {stamps.num_generated} generated tokens"
    yield TimelineEvent(stamps.received, "submitted", came)
    yield TimelineEvent(stamps.accepted, "accepted", "by the engine thread, between two steps")
    yield from _moments_of_loads(stamps.loads)
    yield from _moments_of_encoding(stamps.encoded)
    yield TimelineEvent(stamps.unpaired, "waits", "for a prefill node to reconnect")
    for number, attempt in enumerate(stamps.attempts, 1):
        yield from _moments_of_attempt(attempt, number, stamps.ended)
    why = WHY_HERE.get(stamps.why_here, stamps.why_here)
    yield TimelineEvent(stamps.queued, "queued", f"for local prefill: {why}")
    if stamps.queued:
        admitted = stamps.admitted if stamps.admitted >= stamps.queued else 0.0
        yield TimelineEvent(admitted, "prefills", "first chunk scheduled")
    if stamps.first_token:
        yield TimelineEvent(
            stamps.first_token, "first token", f"{stamps.cached_tokens} tokens were cached"
        )
    for out in stamps.away[::2]:
        yield TimelineEvent(out, "retracted", "moved off the device for lack of pages")
    for back in stamps.away[1::2]:
        yield TimelineEvent(back, "returned", "to the device")
    yield TimelineEvent(stamps.ended, "ended", stamps.end)


def _moments_of_attempt(
    stamps: HandoffTimings, number: int, ended: float
) -> Iterator[TimelineEvent]:
    name = f"hand-off {number}"
    yield TimelineEvent(stamps.opened, "opened", f"{name} at {stamps.prefill} over {stamps.path}")
    yield TimelineEvent(stamps.granted, "granted", f"{name}: pages are reserved here")
    yield TimelineEvent(stamps.first_ready, "ready", f"{name}: the first pages are published")
    read = f"{stamps.num_pages} pages, {stamps.num_bytes} bytes"
    yield TimelineEvent(stamps.landed, "read", f"{name}: {read}")
    yield TimelineEvent(stamps.held, "completed", f"{name}: all pages are valid")
    yield TimelineEvent(stamps.joined, "joined", f"{name}: in the running batch")
    yield TimelineEvent(stamps.lost, "failed", f"{name}: {stamps.reason}")
    if stamps.outcome == "cancelled":
        yield TimelineEvent(ended, "cancelled", f"{name}: {stamps.reason}")


def _moments_of_loads(moments: Sequence[float]) -> Iterator[TimelineEvent]:
    for began in moments[::2]:
        yield TimelineEvent(began, "loading", "its prefix from an offload tier")
    for ended in moments[1::2]:
        yield TimelineEvent(ended, "loaded", "from an offload tier into the prefix cache")


def _moments_of_encoding(moments: Sequence[float]) -> Iterator[TimelineEvent]:
    for moment, name in zip(moments, ("encoding", "encoded"), strict=False):
        yield TimelineEvent(moment, name, "its images, beside the steps of other requests")


def _moments_of_handoff(stamps: ProducerTimings) -> Iterator[TimelineEvent]:
    came = f"hand-off {stamps.attempt}, {stamps.num_prompt} prompt tokens"
    yield TimelineEvent(stamps.opened, "opened", came)
    granted = f"the consumer has {stamps.prefix_tokens} tokens cached"
    yield TimelineEvent(stamps.granted, "granted", granted)
    images = stamps.images
    embeddings = f"embeddings of {images.wanted} images from encode nodes"
    yield TimelineEvent(images.begun, "reading images", embeddings)
    completed = f"{images.completed} of {images.wanted} from encode nodes"
    yield TimelineEvent(images.ended, "images read", completed)
    yield from _moments_of_loads(stamps.loads)
    yield from _moments_of_encoding(stamps.encoded)
    yield TimelineEvent(
        stamps.admitted, "prefills", f"{stamps.cached_tokens} tokens were cached here"
    )
    yield TimelineEvent(stamps.done, "computed", f"chunks: {stamps.num_chunks}")
    end = "released" if stamps.completed else "dropped"
    yield TimelineEvent(
        stamps.closed, end, "the consumer has all pages" if stamps.completed else stamps.reason
    )
