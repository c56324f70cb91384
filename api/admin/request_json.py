"""A request's timeline as JSON: a summary for lists, and the details.

Times are seconds since the request arrived at its router process. Neither prompt nor response text
is included. docs/tracing.md defines the phases.
"""

import time
from typing import Any

from common.requests.timeline import HandoffSummary, Interval, TtftPhase
from router.timelines import AttemptTimings, RequestTimeline


def summary(timeline: RequestTimeline) -> dict[str, Any]:
    last = timeline.submissions[-1] if timeline.submissions else None
    used = _used(last) if last else None
    return {
        "id": timeline.request_id,
        "label": timeline.label or None,
        "outcome": timeline.outcome,
        "arrived": timeline.arrived_unix,
        "seconds": (timeline.ended or time.monotonic()) - timeline.arrived,
        "ttft_s": timeline.first_token - timeline.arrived if timeline.first_token else None,
        "last_token_s": timeline.last_token - timeline.arrived if timeline.last_token else None,
        "prompt_tokens": timeline.prompt_tokens,
        "cached_tokens": timeline.cached_tokens,
        "completion_tokens": timeline.completion_tokens,
        "decode": last.decode if last else None,
        "prefill": used.prefill if used else None,
        "path": used.path if used else None,
        "replays": timeline.num_replays,
        "moves": timeline.num_moves,
        "trace_id": timeline.trace.trace_id or None,
    }


def details(timeline: RequestTimeline) -> dict[str, Any]:
    phases = [
        _phase("router", "", name, 0, start - timeline.arrived, end - timeline.arrived)
        for name, start, end in timeline.router_phases()
    ]
    marks = []
    attempts: list[dict[str, Any]] = []
    if timeline.first_token:
        marks.append(_mark("router", timeline.first_token - timeline.arrived))
    for submission in timeline.submissions:
        told = submission.timeline
        zero = submission.begin(told, timeline.first_token) - timeline.arrived
        phases += [_of_node(row, submission, told.attempts, zero) for row in told.intervals]
        attempts += [
            _attempt(number, one, submission) for number, one in enumerate(told.attempts, 1)
        ]
        if told.first_token is not None:
            marks.append(_mark("decode", zero + told.first_token))
    parts = timeline.split() or ()
    return {
        "error": timeline.error,
        "ttft": [
            {"phase": phase.label, "seconds": seconds}
            for phase, seconds in zip(TtftPhase, parts, strict=False)
            if seconds
        ],
        "phases": sorted(phases, key=lambda phase: (phase["start_s"], phase["end_s"])),
        "attempts": attempts,
        "marks": marks,
    }


def _used(submission: AttemptTimings) -> HandoffSummary | None:
    """Return the completed hand-off whose KV the request used."""
    held = [one for one in submission.timeline.attempts if one.outcome == "completed"]
    return held[-1] if held else None


def _of_node(
    row: Interval, submission: AttemptTimings, attempts: tuple[HandoffSummary, ...], zero: float
) -> dict[str, Any]:
    where, node = "decode", submission.decode
    if row.phase.on_prefill_node and row.attempt:
        where, node = "prefill", attempts[row.attempt - 1].prefill
    name = row.phase.name.lower()
    return _phase(where, node, name, row.attempt, zero + row.start, zero + row.end)


def _phase(
    where: str, node: str, name: str, attempt: int, start_s: float, end_s: float
) -> dict[str, Any]:
    return {
        "where": where,
        "node": node,
        "phase": name,
        "attempt": attempt,
        "start_s": start_s,
        "end_s": end_s,
    }


def _mark(where: str, at_s: float) -> dict[str, Any]:
    return {"where": where, "mark": "first_token", "at_s": at_s}


def _attempt(number: int, attempt: HandoffSummary, submission: AttemptTimings) -> dict[str, Any]:
    return {
        "number": number,
        "node": submission.decode,
        "prefill": attempt.prefill,
        "path": attempt.path,
        "outcome": attempt.outcome,
        "reason": attempt.reason,
        "pages": attempt.num_pages,
        "bytes": attempt.num_bytes,
        "chunks": attempt.num_chunks,
    }
