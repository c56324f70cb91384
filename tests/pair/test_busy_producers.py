"""Producers that refuse a hand-off because what waits there takes too long: where it goes then.

Their engines are played by the test, behind the transfer threads of the product.
"""

import time
from collections.abc import Sequence

import pytest
from grpc import StatusCode

from engine.batch.request import FinishReason
from kvtransfer.messages import HandoffFailed
from kvtransfer.ports import ClosedEvent, FailCommand, OpenedEvent
from tests.pair.rig import Asked, Node, PairRig, Size
from tests.pair.states import LONG

RETRY_AFTER_S = 1.5
REASON = "too much waits here"


def _refuse(rig: PairRig, busy: Sequence[int]) -> None:
    """These producers do, one hand-off each and one after the other; all others have their
    turns."""
    for index in busy:
        _refuse_one(rig, rig.prefill[index], [rig.prefill[i] for i in busy])


def _refuse_one(rig: PairRig, producer: Node, busy: Sequence[Node]) -> None:
    others = [node for node in rig.nodes if node not in busy]
    events: list[object] = []

    def opened() -> list[OpenedEvent]:
        events.extend(producer.transfer.take())
        return [event for event in events if isinstance(event, OpenedEvent)]

    def is_dropped() -> bool:
        events.extend(producer.transfer.take())
        return any(isinstance(event, ClosedEvent) for event in events)

    rig.until(opened, "it is opened", *others)
    (event,) = opened()
    producer.transfer.post(FailCommand(event.serial, REASON, True, RETRY_AFTER_S))
    rig.until(is_dropped, "the producer has forgotten it", *others)


def _assert_refused(asked: Asked) -> None:
    assert asked.ended is not None and asked.reason is FinishReason.ERROR
    reported = (asked.ended.error_code, asked.ended.error, asked.ended.retry_after_s)
    assert reported == (StatusCode.RESOURCE_EXHAUSTED.value[0], REASON, RETRY_AFTER_S)
    assert asked.tokens == []


# Seen failing with every such hand-off refused for good, and with the refused producer asked again.
@pytest.mark.parametrize("num_busy", [1, 2])
def test_a_prompt_that_one_producer_has_no_time_for_goes_to_another(known, num_busy):
    producers = [Size()] * (num_busy + 1)
    with PairRig(known.loaded, prefill=producers, handoff_retries=num_busy) as rig:
        (decode,) = rig.decode
        asked = rig.ask(LONG)
        _refuse(rig, range(num_busy))
        rig.run()
        assert asked.tokens == known.greedy(LONG, len(asked.tokens))
        assert rig.prefill[-1].count("handoffs_completed") == 1
        assert decode.count("handoff_retries") == num_busy
        assert decode.count("local_prefills") == 0


# Seen failing with it dispatched like one that is lost: it is prefilled here.
@pytest.mark.parametrize(
    "num_producers, retries",
    [(1, 2), (2, 2), (3, 1)],
    ids=["one", "two", "as many as may be asked"],
)
def test_a_prompt_that_no_producer_has_time_for_is_refused_and_not_prefilled_here(
    known, num_producers, retries
):
    with PairRig(known.loaded, prefill=[Size()] * num_producers, handoff_retries=retries) as rig:
        (decode,) = rig.decode
        asked = rig.ask(LONG)
        _refuse(rig, range(min(num_producers, retries + 1)))
        rig.run()
        _assert_refused(asked)
        assert decode.count("refused/late") == 1
        assert decode.count("local_prefills") == 0


# Seen failing without the look at `start_by`: the other producer is asked.
def test_a_prompt_whose_time_is_over_when_a_producer_refuses_it_goes_to_no_other(known):
    with PairRig(known.loaded, prefill=[Size(), Size()]) as rig:
        _, other = rig.prefill
        (decode,) = rig.decode
        rig.wires.hold_back(HandoffFailed)
        begun = time.monotonic()
        asked = rig.ask(LONG, queue_s=4.0)  # to get to the producer in, however slow the machine is
        _refuse(rig, [0])
        rig.let_time_pass(begun + 4.1)
        rig.wires.let_go()
        rig.run()
        _assert_refused(asked)
        assert other.queue("bootstrap") == 0 and decode.count("handoffs_opened") == 1
        assert decode.count("local_prefills") == 0
