"""OpenTelemetry spans of a node: its part of a request, with that part's phases as child spans."""

from collections.abc import Iterator

from common.requests.timeline import HandoffSummary, Timeline
from common.tracing.context import Attributes, ChildSpan, TraceContext, Tracer
from node.messages import HandoffSpan, RequestEnded


def record_request(tracer: Tracer, ended: RequestEnded) -> None:
    """Record a decode node's span of an ended request, if the request is traced here."""
    stamps = ended.stamps
    if stamps is None or not stamps.trace.own:
        return
    timeline = stamps.timeline()
    held = [one for one in timeline.attempts if one.outcome == "completed"]
    tracer.record(
        stamps.trace,
        "baton.decode",
        begun=stamps.received,
        ended=stamps.ended,
        children=list(_children(timeline, stamps.received)),
        attributes={
            "baton.request_id": stamps.request_id,
            "baton.attempts": len(timeline.attempts),
            "gen_ai.usage.input_tokens": stamps.num_prompt,
            **(_of_attempt(held[-1]) if held else {}),
        },
        error=ended.error,
    )


def record_handoff(tracer: Tracer | None, handoff: HandoffSpan) -> None:
    """Record a prefill node's span of an ended hand-off."""
    if tracer is None:
        return
    stamps = handoff.stamps
    tracer.record(
        TraceContext(stamps.traceparent),
        "baton.prefill",
        begun=stamps.opened,
        ended=stamps.closed,
        children=list(_children(stamps.timeline(), stamps.opened)),
        attributes={
            "baton.request_id": stamps.request_id,
            "baton.held": int(stamps.completed),
            "baton.chunks": stamps.num_chunks,
            "gen_ai.usage.input_tokens": stamps.num_prompt,
        },
        error="" if stamps.completed else stamps.reason,
    )


def _children(timeline: Timeline, zero: float) -> Iterator[ChildSpan]:
    """Yield the phases. A decode node skips those of a prefill node, which reports them itself."""
    for row in timeline.intervals:
        if row.phase.on_prefill_node and row.attempt:
            continue
        attributes = _of_attempt(timeline.attempts[row.attempt - 1]) if row.attempt else {}
        yield ChildSpan(row.phase.name.lower(), zero + row.start, zero + row.end, attributes)


def _of_attempt(attempt: HandoffSummary) -> Attributes:
    return {
        "baton.prefill": attempt.prefill,
        "baton.path": attempt.path,
        "baton.outcome": attempt.outcome,
        "baton.pages": attempt.num_pages,
        "baton.bytes": attempt.num_bytes,
    }
