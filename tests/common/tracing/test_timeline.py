"""Timelines of peers, and their division into phases: any input gives a possible timeline."""

import math

from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.requests.timeline import (
    MAX_ATTEMPTS,
    MAX_INTERVALS,
    MAX_TEXT,
    Phase,
    PrefillTimes,
    TtftPhase,
    from_proto,
    split_ttft,
    to_proto,
)
from protos import decode_pb2 as pb

moments = st.floats(allow_nan=True, allow_infinity=True)
durations = st.floats(0.0, 1e6)
anything = st.builds(
    pb.Timeline,
    phase=st.lists(st.integers(0, 20), max_size=200),
    attempt=st.lists(st.integers(0, 20), max_size=200),
    start_s=st.lists(moments, max_size=200),
    end_s=st.lists(moments, max_size=200),
    attempts=st.lists(
        st.builds(
            pb.Attempt,
            prefill_address=st.text(max_size=400),
            outcome=st.sampled_from(["completed", "failed", "cancelled", "else", ""]),
            reason=st.text(max_size=400),
            pages=st.integers(0, 2**32 - 1),
        ),
        max_size=20,
    ),
    first_token_s=st.none() | moments,
)


@settings(max_examples=100)
@given(anything, durations)
def test_a_nodes_timeline_is_cut_to_its_possible_part(message, longest_s):
    timeline = from_proto(message, longest_s)
    assert len(timeline.attempts) <= MAX_ATTEMPTS and len(timeline.intervals) <= MAX_INTERVALS
    for row in timeline.intervals:
        assert 0.0 <= row.start <= row.end <= longest_s
        assert row.attempt <= len(timeline.attempts)
    for one in timeline.attempts:
        assert one.outcome in ("completed", "failed", "cancelled")
        assert max(len(one.prefill), len(one.reason)) <= MAX_TEXT
    assert timeline.first_token is None or 0.0 <= timeline.first_token <= longest_s
    assert from_proto(to_proto(timeline), longest_s) == timeline


ENDLESS = pb.Timeline(phase=[1, 2], attempt=[0, 0], start_s=[math.inf] * 2, end_s=[math.inf] * 2)


@settings(max_examples=100)
@given(anything, durations, durations, durations)
@example(ENDLESS, 0.1, 0.1, 1.0)
def test_the_parts_of_the_time_to_first_token_add_up_to_it(message, tokenize_s, place_s, ttft_s):
    parts = split_ttft(message, tokenize_s=tokenize_s, place_s=place_s, ttft_s=ttft_s)
    assert len(parts) == len(TtftPhase) and min(parts) >= 0.0
    assert math.isclose(sum(parts), ttft_s, rel_tol=1e-9, abs_tol=1e-9)


@settings(max_examples=100)
@given(durations, durations, durations, durations, durations, durations)
def test_durations_of_another_clock_are_placed_between_the_messages_around_them(
    opened, to_grant, to_token, bootstrap, waiting, prefill
):
    granted = opened + to_grant
    token = granted + to_token
    times = PrefillTimes(bootstrap, waiting, prefill, 1)
    queue, wait, compute = times.between(opened, granted, token, 1)
    assert opened <= queue.start <= queue.end == wait.start <= wait.end == compute.start
    assert compute.start <= compute.end <= token
    slack = token - opened - bootstrap - waiting - prefill
    if slack >= 0.0 and granted <= opened + bootstrap <= granted + slack:
        assert math.isclose(compute.end - compute.start, prefill, rel_tol=1e-6, abs_tol=1e-6)


def test_the_phases_are_those_of_the_proto():
    named = {name.removeprefix("PHASE_"): number for name, number in pb.Phase.items() if number}
    assert named == {phase.name: int(phase) for phase in Phase}
