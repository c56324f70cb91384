"""Timings of one request on a node: stamps, from which its front makes a timeline.

Stamps are time.monotonic() of this host. 0.0 means "not yet". They are set as a request goes from
queue to queue, never per token, and are sent to the front once, at the end. No decision depends on
them.
"""

import msgspec

from common.requests.timeline import (
    MAX_ATTEMPTS,
    HandoffSummary,
    Interval,
    Phase,
    PrefillTimes,
    Timeline,
)
from common.tracing.context import TraceContext


class HandoffTimings(msgspec.Struct, array_like=True, eq=False):
    """One attempt at a hand-off, on a decode node."""

    prefill: str  # address
    path: str
    opened: float
    granted: float = 0.0
    first_ready: float = 0.0
    first_token: float = 0.0
    landed: float = 0.0  # its last page
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
    received: float  # at the front
    taken: float  # consumed by the engine thread
    attempts: list[HandoffTimings] = []
    queued: float = 0.0  # for prefill on this node
    admitted: float = 0.0  # to it: its first forward was chosen
    prefilled: float = 0.0  # on this node
    first_token: float = 0.0
    away: list[float] = []  # alternating: when it left the device, and when it returned
    ended: float = 0.0
    num_generated: int = 0  # of the tokens that it arrived with
    unpaired: float = 0.0  # waits for a prefill node to be paired again
    why_here: str = ""  # why it is prefilled on this node
    cached_tokens: int = 0  # of its prompt, in either node's cache
    end: str = ""  # how it ended
    # Alternating: when a load from an offload tier started, and when it ended.
    bringing: list[float] = []

    def open(self, attempt: HandoffTimings) -> None:
        """Add an attempt. Keeps the last MAX_ATTEMPTS."""
        self.attempts.append(attempt)
        del self.attempts[:-MAX_ATTEMPTS]

    def note_first_token(self, now: float) -> None:
        """Record the first token. Later calls have no effect: a repeated prefill sends no first
        token.
        """
        self.first_token = self.first_token or now

    @property
    def had_trouble(self) -> bool:
        """Return whether the request was retracted or lost a hand-off, which may explain
        a delay.
        """
        return bool(self.away) or any(attempt.lost for attempt in self.attempts)

    def timeline(self) -> Timeline:
        """Return the timeline of an ended request."""
        zero, ended = self.received, self.ended
        rows = [Interval(Phase.DISPATCH, 0, 0.0, self.taken - zero)]
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
            tuple(_told(attempt) for attempt in self.attempts),
            self.first_token - zero if self.first_token else None,
        )


class ProducerTimings(msgspec.Struct, array_like=True, eq=False):
    """One hand-off on a prefill node, from its Open on."""

    request_id: str
    num_prompt: int
    traceparent: str
    opened: float
    granted: float = 0.0
    admitted: float = 0.0  # its first forward was chosen
    done: float = 0.0  # its last chunk
    num_chunks: int = 0
    dropped: float = 0.0
    attempt: int = 1  # of its reader, for this request
    cached_tokens: int = 0  # found in this node's cache
    prefix_tokens: int = 0  # that its reader had
    held: bool = False  # its reader has everything
    reason: str = ""  # of a hand-off that was dropped before
    bringing: list[float] = []  # as RequestTimings.bringing

    def times(self) -> PrefillTimes:
        """Return the times of a hand-off whose last chunk is done."""
        return PrefillTimes(
            self.granted - self.opened,
            self.admitted - self.granted,
            self.done - self.admitted,
            self.num_chunks,
        )

    def timeline(self) -> Timeline:
        """Return the timeline of a dropped hand-off."""
        begun = (
            (Phase.BOOTSTRAP_QUEUE, self.opened),
            (Phase.WAITING_QUEUE, self.granted),
            (Phase.PREFILL, self.admitted),
            (Phase.INFLIGHT_QUEUE, self.done),
        )
        return Timeline(tuple(_chain(begun, self.dropped, self.opened)))


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
    """Return phases that follow each other. Phases that never began are left out."""
    there = [(phase, start - zero) for phase, start in begun if start]
    ends = [*(start for _, start in there[1:]), until - zero]
    return [
        Interval(phase, attempt, start, end)
        for (phase, start), end in zip(there, ends, strict=True)
    ]


def _told(attempt: HandoffTimings) -> HandoffSummary:
    return HandoffSummary(
        attempt.prefill,
        attempt.path,
        attempt.outcome,
        attempt.reason,
        attempt.num_pages,
        attempt.num_bytes,
        attempt.times.num_chunks if attempt.times else 0,
    )
