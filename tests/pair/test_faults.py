"""Faults in hand-offs: the client gets the tokens of an undisturbed run, and no byte is written
into a page of another producer."""

import time
from functools import partial

import pytest

from common.config import TransferConfig
from kvtransfer.messages import Heartbeat, PagesReleased, ReadsDone
from tests.pair.rig import PATIENT, Asked, PairRig, Size
from tests.pair.states import AT_THE_PRODUCER, EVERYWHERE, LONG, OTHER, between_chunks
from tests.pair.wires import BOTH

NUM_TOKENS = 8
WHOLE = 128  # tokens per chunk: the prompts here are published, and read, at once
MAX_ASKED = 20
NERVOUS = TransferConfig(
    heartbeat_s=0.1, max_missed_heartbeats=10, release_timeout_s=1.0, canary_tokens=0
)


def _frozen_read(rig: PairRig, prompt=LONG, **how) -> Asked:
    """A request whose read stops in the middle."""
    rig.faults[0].freeze()
    asked = rig.ask(prompt, NUM_TOKENS, **how)
    rig.until(lambda: rig.faults[0].wait_until_resting(1, 0.0), "the read has begun")
    rig.until(lambda: asked.tokens, "its first token is told")
    return asked


# Reads ------------------------------------------------------------------------------------------


def test_slow_reads_delay_only_their_own_request(known):
    with PairRig(known.loaded, prefill=[Size(), Size()]) as rig:
        rig.faults[0].freeze()
        slow = [rig.ask(LONG, prefill=[0]), rig.ask(OTHER, prefill=[0])]
        fast = [rig.ask(LONG, prefill=[1]), rig.ask(OTHER[:50], prefill=[])]
        rig.run(*fast)
        assert [len(one.tokens) for one in slow] == [1, 1]  # sent before its KV has arrived
        assert rig.decode[0].queue("on_device") == 0
        rig.faults[0].release()
        rig.faults[0].delay(0.01)
        rig.run()
        known.check(*slow, *fast)
        assert rig.decode[0].count("handoffs_failed") == 0


READ_FAULTS = {  # reason of the failed attempt
    "fail_next": "by the test",
    "truncate_next": "by the test",
    # Seen failing with `PageChecksums.wrong` always empty: the attempt is held.
    "corrupt_next": "differ from what was published",
}


@pytest.mark.parametrize("producers", [[0], [0, 1]], ids=["then here", "then elsewhere"])
@pytest.mark.parametrize("fault", READ_FAULTS)
def test_a_failed_read_fails_the_attempt_and_not_the_response(known, fault, producers):
    with PairRig(known.loaded, prefill=[Size(), Size()], chunked_prefill_tokens=32) as rig:
        reasons = () if fault == "corrupt_next" else ("by the test",)
        getattr(rig.faults[0], fault)(*reasons)
        asked = rig.serve(LONG, prefill=producers)
        known.check(asked)
        lost, *_ = asked.ended.stamps.timeline().attempts
        assert lost.outcome == "failed" and READ_FAULTS[fault] in lost.reason
        decode = rig.decode[0]
        assert decode.count("handoffs_failed") == 1
        assert decode.count("handoffs_opened") == len(producers)
        rig.until_paired()
        again = rig.serve(OTHER, prefill=[0])
        known.check(again)
        assert decode.count("handoffs_completed") == len(producers)


def test_a_read_past_its_deadline_is_abandoned_and_others_are_repeated(known):
    transfer = PATIENT.model_copy(update={"read_timeout_s": 1.0})
    with PairRig(known.loaded, transfer=transfer) as rig:
        (decode,) = rig.decode
        late = _frozen_read(rig)
        neighbour = rig.ask(OTHER)
        rig.until(lambda: decode.count("handoffs_failed"), "the late read is given up")
        rig.faults[0].release()
        rig.run()
        known.check(late, neighbour)
        assert (decode.count("handoffs_failed"), decode.count("handoffs_completed")) == (1, 1)
        assert decode.count("local_prefills") == 1


def test_a_late_read_writes_only_into_free_pages(known):
    """Seen failing without the READ hold of PageReservations.reserve: the request that got the
    pages of the cancelled one continued with KV of the cancelled one."""
    with PairRig(known.loaded, chunked_prefill_tokens=WHOLE) as rig:
        (prefill,) = rig.prefill
        gone = _frozen_read(rig)
        behind = rig.ask(LONG[20:])  # its read waits for the frozen one
        rig.until(lambda: prefill.queue("inflight") == 2, "both are published")
        rig.cancel(gone)
        rig.until(lambda: gone.ended, "the first is cancelled")
        heir = rig.ask(OTHER, 40, prefill=[])  # would get the pages that were freed last
        rig.until(lambda: len(heir.tokens) == 3, "the third one runs")
        rig.faults[0].release()
        rig.until(lambda: rig.wires.said(ReadsDone), "all reads have ended", prefill)
        rig.run()
        known.check(heir, behind)


def test_published_pages_are_not_reused_while_they_may_be_read(known):
    """Seen failing without the PUBLICATION hold of the producer's Handoffs.admitted: the second
    prompt was computed into the pages of the first, and then the rest of these was read."""
    with PairRig(
        known.loaded, prefill=[Size(prefix_cache=False)], chunked_prefill_tokens=WHOLE
    ) as rig:
        (prefill,) = rig.prefill
        first = _frozen_read(rig)
        second = rig.ask(OTHER)
        rig.until(lambda: prefill.queue("inflight") == 2, "both are published")
        rig.faults[0].release()
        rig.run()
        known.check(first, second)


def test_no_token_is_computed_from_pages_that_their_producer_has_released(known):
    """The producer, cut off, releases the pages and computes another prompt into them. The consumer
    still reads them, and all of its reads succeed.

    Seen failing with `held` set in Handoffs.first_token, and with ConsumerEnd finishing an attempt
    when all is read.
    """
    with PairRig(
        known.loaded,
        prefill=[Size(prefix_cache=False)],
        decode=[Size(), Size()],
        chunked_prefill_tokens=WHOLE,
        # the other prompt has as much time
        transfer=PATIENT.model_copy(update={"release_timeout_s": 2.0}),
    ) as rig:
        (prefill,), (decode, other) = rig.prefill, rig.decode
        asked = _frozen_read(rig)
        rig.wires.cut(prefill.front, decode.front, sides=["producer"])
        rig.until(lambda: prefill.holds_nothing, "the producer has let go")
        thief = rig.ask(OTHER, node=1)
        rig.until(lambda: prefill.queue("inflight"), "the producer has used the pages anew")
        rig.faults[0].release()
        rig.run()
        known.check(asked, thief)
        assert (decode.count("handoffs_failed"), decode.count("handoffs_completed")) == (1, 0)
        assert other.count("handoffs_completed") == 1
        rig.wires.heal()


# Streams ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sides",
    [
        pytest.param(BOTH, id="cut"),
        pytest.param(["consumer"], id="consumer"),
        pytest.param(["producer"], id="producer", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("state", EVERYWHERE, ids=str)
def test_a_cut_stream_fails_its_attempts_and_is_replaced(known, state, sides):
    """On both sides, or at first detected on one side only."""
    with state.rig(known.loaded, transfer=NERVOUS) as rig:
        (prefill,), (decode,) = rig.prefill, rig.decode
        asked = state.reach(rig, rig.ask)
        rig.wires.cut(prefill.front, decode.front, sides)
        rig.wires.release()
        rig.faults[0].release()
        rig.run()
        known.check(*rig.asked)
        rig.wires.heal()
        rig.until(lambda: rig.wires.num_begun > 1, "the consumer has noticed")
        rig.until_paired()
        held = decode.count("handoffs_completed")
        # until the engine gets the new stream, it prefills prompts itself
        for _ in range(MAX_ASKED):
            again = rig.serve(asked.prompt)
            known.check(again)
            if decode.count("handoffs_completed") > held:
                return
        raise AssertionError("no hand-off went over the new stream")


def test_both_ends_close_a_silent_stream(known):
    with PairRig(known.loaded, transfer=NERVOUS) as rig:
        (prefill,) = rig.prefill
        asked = _frozen_read(rig)
        rig.wires.hold_back(Heartbeat)
        rig.until(lambda: prefill.holds_nothing, "the producer has let go")
        rig.faults[0].release()
        rig.run()
        known.check(asked)
        rig.wires.release()
        rig.until_paired()


def test_an_unanswered_done_is_abandoned(known):
    with PairRig(
        known.loaded, transfer=PATIENT.model_copy(update={"release_timeout_s": 0.2})
    ) as rig:
        rig.wires.hold_back(PagesReleased)
        asked = rig.serve(LONG)
        known.check(asked)
        assert rig.decode[0].count("local_prefills") == 1
        rig.wires.release()


def test_a_producer_that_stops_computing_loses_its_attempt(known):
    transfer = PATIENT.model_copy(update={"chunk_timeout_s": 0.3})
    with PairRig(known.loaded, transfer=transfer, chunked_prefill_tokens=16) as rig:
        asked = between_chunks(rig, rig.ask)
        rig.until(lambda: asked.ended, "the decode node prefills by itself", *rig.decode)
        known.check(asked)
        rig.settle()
        rig.until_free(*rig.prefill)  # it stops at the next chunk boundary
        assert rig.prefill[0].count("generated_tokens") == 0


def test_an_attempt_lost_at_the_deadline_opens_no_other(known):
    """Seen failing if an Open is sent nevertheless: the other producer refused the pair because
    of its negative budget."""
    with PairRig(known.loaded, prefill=[Size(), Size()], chunked_prefill_tokens=16) as rig:
        (decode,) = rig.decode
        begun = time.monotonic()
        asked = between_chunks(rig, partial(rig.ask, budget_s=1.5))
        rig.wires.cut(rig.prefill[0].front, decode.front)
        rig.let_time_pass(begun + 1.6)
        rig.run()
        assert asked.ended.error_code == 4
        again = rig.serve(LONG, prefill=[1])
        known.check(again)
        assert rig.prefill[1].count("handoffs_completed") == 1
        rig.wires.heal()


@pytest.mark.parametrize("state", AT_THE_PRODUCER, ids=str)
def test_two_consumers_of_one_producer_do_not_affect_each_other(known, state):
    """One of them is cut off. The other's hand-off of the same prompt continues."""
    sizes = {"decode": [Size(), Size()]}
    with state.rig(known.loaded, **sizes) as rig:
        (prefill,), (decode, other) = rig.prefill, rig.decode
        asked = state.reach(rig, rig.ask)
        twin = rig.ask(asked.prompt, node=1)
        rig.wires.cut(prefill.front, decode.front)
        rig.wires.release()
        rig.faults[0].release()
        rig.run()
        known.check(*rig.asked)
        rig.wires.heal()
        rig.until_paired()
        assert other.count("handoffs_completed") == 1 and twin.ended
