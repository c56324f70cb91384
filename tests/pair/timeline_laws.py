"""Invariants of the timeline of every request, however it ended."""

import itertools

from common.requests.timeline import (
    Interval,
    Phase,
    Timeline,
    TtftPhase,
    from_proto,
    split_ttft,
    to_proto,
)
from node.messages import RequestEnded

CHAIN = (Phase.PREALLOC_QUEUE, Phase.PREFILL_WAIT, Phase.TRANSFER, Phase.RELEASE, Phase.JOIN)
ON_PREFILL_NODE = (Phase.BOOTSTRAP_QUEUE, Phase.WAITING_QUEUE, Phase.PREFILL)
LOCAL = (Phase.LOCAL_QUEUE, Phase.LOCAL_PREFILL)


def of(timeline: Timeline, *phases: Phase, attempt: int = 0) -> list[Interval]:
    return [row for row in timeline.intervals if row.phase in phases and row.attempt == attempt]


def follow(rows: list[Interval], chain: tuple[Phase, ...]) -> None:
    """The first phases of the chain, one after the other without a gap."""
    assert tuple(row.phase for row in rows) == chain[: len(rows)]
    for before, after in itertools.pairwise(rows):
        assert before.end == after.start


def check(ended: RequestEnded, num_tokens: int) -> None:
    timeline = ended.stamps.timeline()
    last = max(row.end for row in timeline.intervals)
    for row in timeline.intervals:
        assert 0.0 <= row.start <= row.end <= last, row
    (dispatch,) = of(timeline, Phase.DISPATCH)
    assert dispatch.start == 0.0
    assert (timeline.first_token is not None) is (num_tokens > 0)
    _check_attempts(timeline, last)
    follow(of(timeline, *LOCAL), LOCAL)
    _check_running(timeline, last, num_tokens)
    assert _rounded(from_proto(to_proto(timeline), 1e9)) == _rounded(timeline)
    if timeline.first_token is not None:
        _check_split(timeline, timeline.first_token)


def _check_attempts(timeline: Timeline, last: float) -> None:
    outcomes = [one.outcome for one in timeline.attempts]
    assert set(outcomes[:-1]) <= {"failed"}
    over = 0.0
    for number, one in enumerate(timeline.attempts, 1):
        chain = of(timeline, *CHAIN, attempt=number)
        assert chain, "an attempt without its prealloc queue"
        follow(chain, CHAIN)
        assert chain[0].start >= over
        over = chain[-1].end
        if one.outcome == "completed":
            assert len(chain) == len(CHAIN)
        elif number == len(timeline.attempts) and one.outcome == "cancelled":
            assert over == last
        computed = of(timeline, *ON_PREFILL_NODE, attempt=number)
        if computed:
            follow(computed, ON_PREFILL_NODE)
            assert len(computed) == len(ON_PREFILL_NODE)
            assert chain[0].start <= computed[0].start
            assert timeline.first_token is not None
            assert computed[-1].end <= over
            assert one.num_chunks or not any(row.end - row.start for row in computed[2:])
        if local := of(timeline, Phase.LOCAL_QUEUE):
            assert local[0].start >= over


def _check_running(timeline: Timeline, last: float, num_tokens: int) -> None:
    running = of(timeline, Phase.RUNNING)
    assert len(running) <= 1
    # The last chunk of a retracted request may still be running.
    begun = [row.start for row in of(timeline, Phase.RUNNING, Phase.LOCAL_PREFILL)]
    for away in of(timeline, Phase.RETRACTED):
        assert begun and min(begun) <= away.start
    # Each prefill gives one token, also one after a lost hand-off. All others are from steps of the
    # running batch.
    prefills = (Phase.PREFILL, Phase.LOCAL_PREFILL)
    num_prefills = sum(row.phase in prefills for row in timeline.intervals)
    if num_tokens > max(num_prefills, 1):
        assert running and running[0].start < running[0].end
    if running:
        assert running[0].end == last
        before = [row for row in timeline.intervals if row.phase in (Phase.JOIN, *LOCAL)]
        assert running[0].start == max(row.end for row in before)


def _check_split(timeline: Timeline, first_token: float) -> None:
    parts = split_ttft(to_proto(timeline), tokenize_s=0.25, place_s=0.5, ttft_s=first_token + 1.0)
    assert abs(sum(parts) - first_token - 1.0) < 1e-9
    assert all(part >= 0.0 for part in parts)
    assert parts[TtftPhase.TOKENIZE] == 0.25
    assert parts[TtftPhase.PLACE] == 0.5
    assert parts[TtftPhase.NETWORK] >= 0.25 - 1e-9  # time that no phase of the node has


def _rounded(timeline: Timeline) -> object:
    return timeline.intervals, timeline.attempts, timeline.first_token
