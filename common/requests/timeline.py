"""Timeline and traces of a request, as nodes report them.

A timeline is a fixed set of phases, each with start and end, for metrics and diagrams. A decode
node sends it with the end of a request, in seconds since it got the request. It has only durations
of the prefill node, from the last Ready, so clocks of different hosts are never compared. A trace
is a list of events in words at one process, for people.

Data from peers is not trusted: it is limited to valid values.
"""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from math import inf, isfinite
from typing import NamedTuple, cast

import msgspec

from protos import decode_pb2 as pb
from protos import node_pb2, router_pb2

MAX_ATTEMPTS = 16
MAX_INTERVALS = 8 * MAX_ATTEMPTS
MAX_TEXT = 300  # characters of an address or a reason


class Phase(IntEnum):
    """Phases, with the numbers of decode.proto. `->` separates start and end.

    Phases of a hand-off attempt also have the attempt's number.
    """

    DISPATCH = 1  # Submit at the frontend -> the engine thread has it
    PREALLOC_QUEUE = 2  # opened at a prefill node -> pages reserved, granted
    PREFILL_WAIT = 3  # granted -> first Ready
    TRANSFER = 4  # first Ready -> last page read
    RELEASE = 5  # last page read -> released as completed
    JOIN = 6  # completed -> in the running batch
    LOCAL_QUEUE = 7  # waiting queue of a prompt that the decode node prefills
    LOCAL_PREFILL = 8  # its first forward is chosen -> its first token
    RUNNING = 9  # in the running batch -> ended
    RETRACTED = 10  # KV moved to host memory because pages were short; inside RUNNING
    BOOTSTRAP_QUEUE = 11  # prefill node: Open arrived -> granted
    WAITING_QUEUE = 12  # prefill node: granted -> its first forward is chosen
    PREFILL = 13  # prefill node: first chunk chosen -> last chunk done
    INFLIGHT_QUEUE = 14  # prefill node: last chunk done -> dropped; known only to that node

    @property
    def on_prefill_node(self) -> bool:
        return self >= Phase.BOOTSTRAP_QUEUE


class TtftPhase(IntEnum):
    """Parts of the time to first token. The last one is the unmeasured remainder."""

    TOKENIZE = 0
    PLACE = 1
    DISPATCH = 2
    RETRIES = 3  # hand-off attempts before the successful one
    PREALLOC_QUEUE = 4
    WAITING_QUEUE = 5
    PREFILL = 6
    NETWORK = 7

    @property
    def label(self) -> str:
        return self.name.lower()


class Interval(NamedTuple):
    phase: Phase
    attempt: int  # from 1; 0: the phase belongs to no attempt
    start: float  # seconds since the Submit arrived
    end: float


class HandoffSummary(msgspec.Struct, frozen=True, array_like=True):
    """A hand-off attempt."""

    prefill: str  # address of the prefill node
    path: str  # data path to it
    outcome: str  # "completed" | "failed" | "cancelled"
    reason: str = ""
    num_pages: int = 0  # pages read
    num_bytes: int = 0
    num_chunks: int = 0  # chunks of the prompt


class Timeline(msgspec.Struct, frozen=True, array_like=True):
    intervals: tuple[Interval, ...] = ()
    attempts: tuple[HandoffSummary, ...] = ()
    first_token: float | None = None  # when the decode node had it, in seconds


NOTHING = Timeline()


class PrefillTimes(msgspec.Struct, frozen=True, array_like=True):
    """Durations of a hand-off as measured by the prefill node, on its own clock."""

    bootstrap_s: float  # Open arrived -> granted
    waiting_s: float  # granted -> its first forward was chosen
    prefill_s: float  # first chunk chosen -> last chunk done
    num_chunks: int

    def between(
        self, opened: float, granted: float, first_token: float, attempt: int
    ) -> list[Interval]:
        """Return these durations as intervals on the decode node's clock.

        They are centred in the possible range, and cut where they do not fit.
        """
        total = self.bootstrap_s + self.waiting_s + self.prefill_s
        earliest = max(opened, granted - self.bootstrap_s)
        latest = max(first_token - total, earliest)
        start = (earliest + latest) / 2
        rows = []
        for phase, seconds in (
            (Phase.BOOTSTRAP_QUEUE, self.bootstrap_s),
            (Phase.WAITING_QUEUE, self.waiting_s),
            (Phase.PREFILL, self.prefill_s),
        ):
            end = start + seconds
            rows.append(Interval(phase, attempt, min(start, first_token), min(end, first_token)))
            start = end
        return rows


def to_proto(timeline: Timeline) -> pb.Timeline:
    intervals = timeline.intervals
    message = pb.Timeline(
        phase=[cast(pb.Phase, row.phase) for row in intervals],
        attempt=[row.attempt for row in intervals],
        start_s=[row.start for row in intervals],
        end_s=[row.end for row in intervals],
        attempts=[
            pb.Attempt(
                prefill_address=one.prefill,
                path=one.path,
                outcome=one.outcome,
                reason=one.reason,
                pages=one.num_pages,
                bytes=one.num_bytes,
                chunks=one.num_chunks,
            )
            for one in timeline.attempts
        ],
    )
    if timeline.first_token is not None:
        message.first_token_s = timeline.first_token
    return message


def from_proto(message: pb.Timeline, longest_s: float) -> Timeline:
    """Parse a timeline, limited to valid values.

    Args:
        longest_s: seconds since the request was sent there. Nothing in the timeline can be later.
    """
    attempts = tuple(
        HandoffSummary(
            one.prefill_address[:MAX_TEXT],
            one.path[:MAX_TEXT],
            one.outcome if one.outcome in ("completed", "failed") else "cancelled",
            one.reason[:MAX_TEXT],
            one.pages,
            one.bytes,
            one.chunks,
        )
        for one in message.attempts[:MAX_ATTEMPTS]
    )
    # If column lengths differ, the excess is ignored.
    rows = zip(message.phase, message.attempt, message.start_s, message.end_s, strict=False)
    intervals: list[Interval] = []
    for phase, attempt, start, end in list(rows)[:MAX_INTERVALS]:
        known = _PHASES.get(phase)
        if known is not None and attempt <= len(attempts) and 0.0 <= start <= end:  # no NaN
            end = min(end, longest_s)
            intervals.append(Interval(known, attempt, min(start, end), end))
    first_token = message.first_token_s if message.HasField("first_token_s") else None
    if first_token is not None and not 0.0 <= first_token <= longest_s:
        first_token = None
    return Timeline(tuple(intervals), attempts, first_token)


_PHASES = {int(phase): phase for phase in Phase}


def split_ttft(
    message: pb.Timeline, *, tokenize_s: float, place_s: float, ttft_s: float
) -> tuple[float, ...]:
    """Return the seconds of each TtftPhase, in order. Their sum is always `ttft_s`.

    Args:
        tokenize_s, place_s: measured by the router, including everything before it submitted the
            request to the node of this timeline.
        ttft_s: measured by the router.
    """
    rows = [
        row
        for row in zip(message.phase, message.attempt, message.start_s, message.end_s, strict=False)
        if row[0] in _PARTS and 0.0 <= row[2] <= row[3] < inf  # rejects NaN too
    ]
    parts = [0.0] * len(TtftPhase)
    parts[TtftPhase.TOKENIZE] = tokenize_s
    parts[TtftPhase.PLACE] = place_s
    given_by = _attempt_of_first_token(rows, message.first_token_s)
    first_begun = min((row[2] for row in rows if row[0] in _BEGINNINGS), default=0.0)
    for phase, attempt, start, end in rows:
        if attempt == given_by or int(phase) == Phase.DISPATCH:
            parts[_PARTS[phase]] += end - start
            if phase in _BEGINNINGS:
                parts[TtftPhase.RETRIES] = start - first_begun
    left = ttft_s
    for index, seconds in enumerate(parts):
        parts[index] = min(seconds, left)
        left -= parts[index]
    parts[TtftPhase.NETWORK] = left
    return tuple(parts)


_BEGINNINGS = frozenset((int(Phase.PREALLOC_QUEUE), int(Phase.LOCAL_QUEUE)))
_PARTS = {
    int(Phase.DISPATCH): int(TtftPhase.DISPATCH),
    int(Phase.PREALLOC_QUEUE): int(TtftPhase.PREALLOC_QUEUE),
    int(Phase.WAITING_QUEUE): int(TtftPhase.WAITING_QUEUE),
    int(Phase.PREFILL): int(TtftPhase.PREFILL),
    int(Phase.LOCAL_QUEUE): int(TtftPhase.WAITING_QUEUE),
    int(Phase.LOCAL_PREFILL): int(TtftPhase.PREFILL),
}


def _attempt_of_first_token(
    rows: Sequence[tuple[int, int, float, float]], first_token: float
) -> int:
    """Return the attempt whose prefill node sampled the first token. 0: the decode node did."""
    for phase, attempt, _, end in rows:
        if phase == Phase.PREFILL and end <= first_token:
            return attempt
    return 0


MAX_EVENTS = 256  # events of one trace
MAX_FLIGHTS = 32  # traces of one request at one node
_MAX_WHAT = 32  # characters


class TimelineEvent(NamedTuple):
    at: float  # seconds since the request arrived at the node
    what: str
    detail: str = ""


class RequestTrace(msgspec.Struct, frozen=True, array_like=True):
    began_ago_s: float  # seconds from its arrival at the node to this report
    events: tuple[TimelineEvent, ...]  # ordered by time


class RequestTraces(msgspec.Struct, frozen=True, array_like=True):
    """Traces of one request at one node."""

    flights: tuple[RequestTrace, ...]
    num_kept: int  # ended requests that the node still has


def traces_to_proto(flights: RequestTraces) -> node_pb2.ExplainHereResponse:
    return node_pb2.ExplainHereResponse(
        flights=[
            node_pb2.Flight(
                began_ago_s=flight.began_ago_s, events=[event_to_proto(e) for e in flight.events]
            )
            for flight in flights.flights
        ],
        kept=flights.num_kept,
    )


def event_to_proto(event: TimelineEvent) -> router_pb2.RequestEvent:
    return router_pb2.RequestEvent(at_s=event.at, what=event.what, detail=event.detail)


def traces_from_proto(message: node_pb2.ExplainHereResponse) -> RequestTraces:
    """Parse traces, limited to valid values."""
    flights = (
        RequestTrace(one.began_ago_s, tuple(_valid_events(one.events[:MAX_EVENTS])))
        for one in message.flights[:MAX_FLIGHTS]
        if isfinite(one.began_ago_s)
    )
    return RequestTraces(tuple(flights), message.kept)


def _valid_events(events: Iterable[router_pb2.RequestEvent]) -> Iterable[TimelineEvent]:
    for event in events:
        if isfinite(event.at_s):
            yield TimelineEvent(event.at_s, event.what[:_MAX_WHAT], event.detail[:MAX_TEXT])
