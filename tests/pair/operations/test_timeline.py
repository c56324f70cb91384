"""The timeline that comes with the end of every request."""

import time

import pytest

from common.requests.timeline import Phase
from kvtransfer.messages import GrantHandoff, PagesReady
from tests.pair.rig import Asked, PairRig, Size
from tests.pair.states import LONG, OTHER
from tests.pair.timeline_laws import CHAIN, LOCAL, ON_PREFILL_NODE, check, of

PAGE = 16
DELAY_S = 0.15


def seconds(asked: Asked, phase: Phase, attempt: int = 0) -> float:
    return sum(
        row.end - row.start for row in of(asked.ended.stamps.timeline(), phase, attempt=attempt)
    )


def besides_delay(asked: Asked) -> float:
    """Return the time that remains for phases without the delay, however busy this machine is."""
    return max(row.end for row in asked.ended.stamps.timeline().intervals) - DELAY_S


def test_the_timeline_of_a_hand_off_has_every_phase_of_both_nodes(known):
    with PairRig(known.loaded, chunked_prefill_tokens=32) as rig:
        asked = rig.serve(LONG)
        timeline = asked.ended.stamps.timeline()
        (attempt,) = timeline.attempts
        assert attempt.prefill == rig.prefill[0].front.address
        assert (attempt.path, attempt.outcome) == ("loopback", "completed")
        page_bytes = rig.decode[0].engine.pool.page_bytes
        assert (attempt.num_pages, attempt.num_bytes) == (7, 7 * page_bytes)
        assert attempt.num_chunks == 4
        assert [row.phase for row in of(timeline, *CHAIN, attempt=1)] == list(CHAIN)
        assert [row.phase for row in of(timeline, *ON_PREFILL_NODE, attempt=1)] == list(
            ON_PREFILL_NODE
        )
        assert len(of(timeline, Phase.RUNNING)) == 1 and not of(timeline, *LOCAL)


def test_the_laws_reject_a_running_phase_without_time(known):
    with PairRig(known.loaded) as rig:
        ended = rig.serve(LONG).ended
        (attempt,) = ended.stamps.attempts
        joined, attempt.joined = attempt.joined, ended.stamps.ended
        with pytest.raises(AssertionError):
            check(ended, num_tokens=2)
        attempt.joined = joined


def test_a_prompt_prefilled_on_the_decode_node_has_no_attempt(known):
    with PairRig(known.loaded, prefill=()) as rig:
        asked = rig.serve(LONG)
        timeline = asked.ended.stamps.timeline()
        assert not timeline.attempts
        assert [row.phase for row in of(timeline, *LOCAL)] == list(LOCAL)
        (running,) = of(timeline, Phase.RUNNING)
        assert running.start == timeline.first_token


def test_a_lost_attempt_is_reported_with_its_reason_beside_the_successful_one(known):
    with PairRig(known.loaded, prefill=[Size(), Size()]) as rig:
        rig.faults[0].fail_next("by the test")
        asked = rig.serve(LONG, prefill=[0, 1])
        lost, held = asked.ended.stamps.timeline().attempts
        assert (lost.outcome, held.outcome) == ("failed", "completed")
        assert lost.reason and not held.reason
        assert [lost.prefill, held.prefill] == [node.front.address for node in rig.prefill]
        assert not of(asked.ended.stamps.timeline(), Phase.JOIN, attempt=1)


def test_after_the_last_lost_attempt_the_timeline_has_a_local_prefill(known):
    with PairRig(known.loaded) as rig:
        rig.faults[0].fail_next("by the test")
        asked = rig.serve(LONG)
        assert [one.outcome for one in asked.ended.stamps.timeline().attempts] == ["failed"]
        assert len(of(asked.ended.stamps.timeline(), *LOCAL)) == 2


def test_a_delayed_grant_counts_as_the_prefill_nodes_bootstrap_queue(known):
    with PairRig(known.loaded) as rig:
        rig.wires.hold_back(GrantHandoff)
        asked = rig.ask(LONG)
        rig.until(lambda: rig.decode[0].queue("transfer"), "it is granted")
        rig.until(lambda: rig.prefill[0].queue("bootstrap"), "it is open")
        rig.let_time_pass(time.monotonic() + DELAY_S)
        rig.wires.release()
        rig.run()
        assert seconds(asked, Phase.PREFILL_WAIT, 1) >= DELAY_S
        assert seconds(asked, Phase.BOOTSTRAP_QUEUE, 1) >= DELAY_S
        assert seconds(asked, Phase.PREFILL, 1) <= besides_delay(asked)
        assert seconds(asked, Phase.TRANSFER, 1) <= besides_delay(asked)


def test_delayed_pages_count_as_the_transfer(known):
    with PairRig(known.loaded) as rig:
        rig.faults[0].freeze()
        asked = rig.ask(LONG)
        rig.until(lambda: asked.tokens, "its first token is told")
        rig.let_time_pass(time.monotonic() + DELAY_S)
        rig.faults[0].release()
        rig.run()
        timeline = asked.ended.stamps.timeline()
        (transfer,) = of(timeline, Phase.TRANSFER, attempt=1)
        assert transfer.end - transfer.start >= DELAY_S
        assert timeline.first_token < transfer.end - DELAY_S / 2  # sent before its KV has arrived
        assert seconds(asked, Phase.PREFILL, 1) <= besides_delay(asked)


def test_the_wait_for_the_prefill_node_ends_with_its_first_chunk(known):
    """Seen failing with the time of the last Ready instead of the first one."""
    with PairRig(known.loaded, chunked_prefill_tokens=32) as rig:
        rig.faults[0].freeze()  # all chunks may be there by then, and would be read at once
        asked = rig.ask(LONG)
        rig.until(lambda: rig.wires.said(PagesReady), "a chunk is there")
        rig.let_time_pass(time.monotonic() + DELAY_S)
        rig.faults[0].release()
        rig.run()
        assert seconds(asked, Phase.PREFILL_WAIT, 1) <= besides_delay(asked)
        assert seconds(asked, Phase.TRANSFER, 1) >= DELAY_S / 2


def test_a_retracted_request_has_the_times_of_its_retraction(known):
    with PairRig(known.loaded, decode=[Size(num_pages=16)], new_token_ratio=0.02) as rig:
        asked = [rig.ask(prompt, 60) for prompt in (LONG, OTHER)]
        rig.run()
        assert rig.decode[0].count("retractions")
        away = [seconds(one, Phase.RETRACTED) for one in asked]
        assert sum(each > 0.0 for each in away) >= 1


def test_a_rejected_request_has_a_timeline_too(known):
    with PairRig(known.loaded, context_length=64) as rig:
        asked = rig.serve(LONG)
        assert asked.ended.error
        assert {row.phase for row in asked.ended.stamps.timeline().intervals} == {Phase.DISPATCH}


def test_a_request_that_timed_out_has_a_timeline_up_to_its_end(known):
    with PairRig(known.loaded) as rig:
        rig.wires.hold_back(GrantHandoff)
        asked = rig.ask(LONG, budget_s=1.0)
        rig.run(asked)
        rig.wires.release()
        assert asked.ended.stamps.timeline().attempts[0].outcome in ("cancelled", "failed")
