"""A request's stamps as readable events. Made only on demand."""

from collections.abc import Iterator, Sequence

from common.requests.timeline import MAX_TEXT, RequestTrace, TimelineEvent
from node.timings import HandoffTimings, ProducerTimings, RequestTimings

WHY_HERE = {
    "colocated": "this node computes all prompts itself",
    "short": "few uncached tokens",
    "no_prefill_node": "no candidate prefill node is paired with this node",
    "exhausted": "all hand-off attempts failed",
}


def of_request(stamps: RequestTimings, now: float) -> RequestTrace:
    """Return the events of a submission on a decode node."""
    return _flight(_moments_of_request(stamps), stamps.received, now)


def of_handoff(stamps: ProducerTimings, now: float) -> RequestTrace:
    """Return the events of a hand-off on the prefill node."""
    return _flight(_moments_of_handoff(stamps), stamps.opened, now)


def _flight(moments: Iterator[TimelineEvent], zero: float, now: float) -> RequestTrace:
    """Return the events in order, relative to `zero`. Moments are time.monotonic(). Those that have
    not happened are left out.
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
    yield TimelineEvent(stamps.taken, "accepted", "by the engine thread, between two steps")
    yield from _moments_of_bringing(stamps.bringing)
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


def _moments_of_bringing(moments: Sequence[float]) -> Iterator[TimelineEvent]:
    for began in moments[::2]:
        yield TimelineEvent(began, "loading", "its prefix from an offload tier")
    for ended in moments[1::2]:
        yield TimelineEvent(ended, "loaded", "from an offload tier into the prefix cache")


def _moments_of_handoff(stamps: ProducerTimings) -> Iterator[TimelineEvent]:
    came = f"hand-off {stamps.attempt}, {stamps.num_prompt} prompt tokens"
    yield TimelineEvent(stamps.opened, "opened", came)
    granted = f"the consumer has {stamps.prefix_tokens} tokens already"
    yield TimelineEvent(stamps.granted, "granted", granted)
    yield from _moments_of_bringing(stamps.bringing)
    yield TimelineEvent(
        stamps.admitted, "prefills", f"{stamps.cached_tokens} tokens were cached here"
    )
    yield TimelineEvent(stamps.done, "computed", f"chunks: {stamps.num_chunks}")
    end = "released" if stamps.held else "dropped"
    yield TimelineEvent(
        stamps.dropped, end, "the consumer has all pages" if stamps.held else stamps.reason
    )
