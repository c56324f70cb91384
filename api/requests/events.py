"""A router process's knowledge of a request, as human-readable events."""

from collections.abc import Iterator

import msgspec

from common.requests.timeline import TimelineEvent
from router.timelines import RequestTimeline


class EventHistory(msgspec.Struct, frozen=True):
    """A message between processes of one router. They share their host's monotonic clock."""

    request_id: str
    label: str
    outcome: str
    error: str
    arrived: float  # time.monotonic()
    ended: float  # the same clock, 0.0: still running
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    events: tuple[TimelineEvent, ...]


def event_history(timeline: RequestTimeline) -> EventHistory:
    zero = timeline.arrived
    events = [
        TimelineEvent(event.at - zero, event.what, event.detail)
        for event in _moments(timeline)
        if event.at
    ]
    return EventHistory(
        timeline.request_id,
        timeline.label,
        timeline.outcome,
        timeline.error,
        zero,
        timeline.ended,
        timeline.prompt_tokens,
        timeline.cached_tokens,
        timeline.completion_tokens,
        tuple(sorted(events, key=lambda event: event.at)),
    )


def _moments(timeline: RequestTimeline) -> Iterator[TimelineEvent]:
    """Yield the events by time.monotonic(). 0.0: has not happened yet."""
    yield TimelineEvent(timeline.arrived, "arrived")
    yield TimelineEvent(timeline.tokenized, "tokenized", f"{timeline.prompt_tokens} tokens")
    for number, one in enumerate(timeline.submissions):
        where = f"at decode node {one.decode}"
        if number:
            where += f", with {one.num_tokens} tokens already sent"
        yield TimelineEvent(one.submitted, "replayed" if number else "placed", where)
        yield TimelineEvent(one.lost, "failed", one.because)
    yield TimelineEvent(timeline.first_token, "first token", "sent to the client")
    yield TimelineEvent(
        timeline.last_token, "last token", f"{timeline.completion_tokens} tokens sent"
    )
    ended = f"{timeline.outcome}: {timeline.error}" if timeline.error else timeline.outcome
    yield TimelineEvent(timeline.ended, "ended", ended)
