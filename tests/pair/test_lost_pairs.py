"""All pairs of a decode node end at once and are restored. Lost hand-offs go to a producer
again."""

import pytest

from common.errors import DeadlineExceeded
from node.messages import AbortRequests
from tests.pair.rig import Asked, PairRig, Size
from tests.pair.states import LONG, OTHER

PROMPTS = [LONG, OTHER, LONG[10:60], OTHER[20:]]
FOR_EVER_S = 300.0


def _rig(known, reconnect_wait_s: float = FOR_EVER_S, **how) -> PairRig:
    sizes = [Size(), Size()]
    return PairRig(
        known.loaded,
        prefill=sizes,
        reconnect_wait_s=reconnect_wait_s,
        chunked_prefill_tokens=32,
        **how,
    )


def _cut_all(rig: PairRig) -> None:
    for prefill in rig.prefill:
        rig.wires.cut(prefill.front, rig.decode[0].front)
    rig.until(lambda: not rig.decode[0].control.sources.links, "it is paired with none")


def _under_way(rig: PairRig) -> list[Asked]:
    """Return requests in the middle of a hand-off at either producer. The reads from the first
    are blocked."""
    rig.faults[0].freeze()
    asked = [rig.ask(p, prefill=[i % 2, 1 - i % 2]) for i, p in enumerate(PROMPTS)]
    rig.until(lambda: rig.faults[0].wait_until_resting(1, 0.0), "a read has begun")
    return asked


def test_hand_offs_lost_with_all_pairs_go_to_a_producer_again_and_are_not_prefilled_locally(known):
    """Seen failing if `may_return` of Lost is never set, and with `worth_until` in the past: the
    decode node prefills both."""
    with _rig(known) as rig:
        (decode,) = rig.decode
        asked = _under_way(rig)
        _cut_all(rig)
        new = rig.ask(LONG[::2])
        rig.until(lambda: decode.queue("unpaired") >= 3, "they wait")
        held = decode.pages("request")
        assert not held, "who waits for a producer holds nothing"
        rig.faults[0].release()
        rig.wires.heal()
        rig.run()
        known.check(*asked, new)
        assert decode.count("handoffs_failed") >= 2
        assert decode.count("local_prefills") == 0


def test_the_wait_for_a_producer_is_bounded(known):
    """Seen failing if waiting requests leave only for a producer."""
    with _rig(known, reconnect_wait_s=0.3) as rig:
        (decode,) = rig.decode
        asked = _under_way(rig)
        _cut_all(rig)
        rig.faults[0].release()
        rig.run()
        known.check(*asked)
        assert decode.count("local_prefills") >= 2
        rig.wires.heal()


def test_a_request_that_waits_for_a_producer_can_be_cancelled_aborted_and_time_out(known):
    """Seen failing if DecodeRole._abort ignores `unpaired`, if the wait ignores the deadline,
    and if PrefillPlacement.place ignores it."""
    with _rig(known) as rig:
        (decode,) = rig.decode
        _cut_all(rig)
        gone, aborted = rig.ask(LONG), rig.ask(LONG, request_id="doomed")
        late = rig.ask(OTHER, budget_s=2.0)
        rig.until(lambda: decode.queue("unpaired") == 3 or late.ended, "they wait")
        rig.cancel(gone)
        rig.command(decode, AbortRequests("doomed"))
        rig.run()
        assert gone.ended and aborted.ended
        assert late.ended and late.ended.error_code == DeadlineExceeded.status.value[0]
        assert decode.count("local_prefills") == 0
        rig.wires.heal()


def test_no_request_waits_for_other_producers_while_one_is_paired(known):
    with _rig(known) as rig:
        (decode,) = rig.decode
        asked = _under_way(rig)
        rig.wires.cut(rig.prefill[0].front, decode.front)
        rig.faults[0].release()
        rig.run()
        known.check(*asked)
        assert decode.count("local_prefills") == 0
        assert rig.prefill[1].count("handoffs_completed") == len(asked)
        rig.wires.heal()


@pytest.mark.parametrize("retries", [0, 1])
def test_a_request_without_attempts_left_waits_for_no_producer(known, retries):
    """Seen failing if the number of attempts is not checked before the wait."""
    with _rig(known, handoff_retries=retries) as rig:
        (decode,) = rig.decode
        rig.faults[0].freeze()
        asked = rig.ask(LONG, prefill=[0])
        for attempt in range(retries + 1):
            rig.until(lambda: decode.queue("transfer"), "it is under way")
            _cut_all(rig)
            rig.until(
                lambda attempt=attempt: decode.count("handoffs_failed") > attempt,
                "it knows of that",
            )
            rig.faults[0].release()
            if attempt < retries:
                rig.faults[0].freeze()
                rig.wires.heal()
        rig.run()
        known.check(asked)
        assert decode.count("handoffs_opened") == retries + 1
        assert decode.count("local_prefills") == 1
        rig.wires.heal()


def test_a_request_without_attempts_left_goes_to_no_remaining_producer(known):
    """Seen failing if PrefillPlacement._why_here does not check the number of attempts."""
    with PairRig(known.loaded, prefill=[Size()] * 3, handoff_retries=1) as rig:
        (decode,) = rig.decode
        for faults in rig.faults[:2]:
            faults.freeze()
        asked = rig.ask(LONG)
        for producer in rig.prefill[:2]:
            rig.until(lambda producer=producer: producer.role.busy, "it is under way there")
            rig.wires.cut(producer.front, decode.front)
        for faults in rig.faults[:2]:
            faults.release()
        rig.run()
        known.check(asked)
        assert decode.count("handoffs_opened") == 2
        assert decode.count("local_prefills") == 1
        rig.wires.heal()
