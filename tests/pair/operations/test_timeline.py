"""The timeline that comes with the end of every request: delays in its phases. For the timeline of
other requests see test_explain.py."""

import time

import pytest

from common.requests.timeline import Phase
from kvtransfer.messages import GrantHandoff, PagesReady
from tests.pair.rig import Asked, PairRig
from tests.pair.states import LONG
from tests.pair.timeline_laws import LOCAL, check, of

DELAY_S = 0.15


def seconds(asked: Asked, phase: Phase) -> float:
    """Return the seconds of the first attempt in a phase."""
    return sum(row.end - row.start for row in of(asked.ended.stamps.timeline(), phase, attempt=1))


def besides_delay(asked: Asked) -> float:
    """Return the time that remains for phases without the delay, however busy this machine is."""
    return max(row.end for row in asked.ended.stamps.timeline().intervals) - DELAY_S


def test_the_laws_reject_a_running_phase_without_time(known):
    with PairRig(known.loaded) as rig:
        ended = rig.serve(LONG).ended
        (attempt,) = ended.stamps.attempts
        joined, attempt.joined = attempt.joined, ended.stamps.ended
        with pytest.raises(AssertionError):
            check(ended, num_tokens=2)
        attempt.joined = joined


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
        assert seconds(asked, Phase.PREFILL_WAIT) >= DELAY_S
        assert seconds(asked, Phase.BOOTSTRAP_QUEUE) >= DELAY_S
        assert seconds(asked, Phase.PREFILL) <= besides_delay(asked)
        assert seconds(asked, Phase.TRANSFER) <= besides_delay(asked)


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
        assert seconds(asked, Phase.PREFILL) <= besides_delay(asked)


def test_the_wait_for_the_prefill_node_ends_with_its_first_chunk(known):
    """Seen failing with the time of the last Ready instead of the first one."""
    with PairRig(known.loaded, chunked_prefill_tokens=32) as rig:
        rig.faults[0].freeze()  # all chunks may be there by then, and would be read at once
        asked = rig.ask(LONG)
        rig.until(lambda: rig.wires.said(PagesReady), "a chunk is there")
        rig.let_time_pass(time.monotonic() + DELAY_S)
        rig.faults[0].release()
        rig.run()
        assert seconds(asked, Phase.PREFILL_WAIT) <= besides_delay(asked)
        assert seconds(asked, Phase.TRANSFER) >= DELAY_S / 2


def test_a_request_that_timed_out_has_a_timeline_up_to_its_end(known):
    with PairRig(known.loaded) as rig:
        rig.wires.hold_back(GrantHandoff)
        asked = rig.ask(LONG, budget_s=1.0)
        rig.run(asked)
        rig.wires.release()
        assert asked.ended.stamps.timeline().attempts[0].outcome in ("cancelled", "failed")
