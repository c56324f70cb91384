"""Producers that refuse a hand-off because their queue is too long: the choice of the next node.

The test plays their engines, behind the transfer threads of the product.
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
    """Let these producers refuse one hand-off each, one after the other. All other nodes get
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


# Seen failing if every such hand-off fails for good, and if the producer that refused is chosen
# again.
@pytest.mark.parametrize("num_busy", [1, 2])
def test_a_prompt_refused_by_a_busy_producer_goes_to_another_one(known, num_busy):
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


# Seen failing if it is dispatched like one whose producer is lost: it is prefilled on the decode
# node.
@pytest.mark.parametrize(
    "num_producers, retries",
    [(1, 2), (2, 2), (3, 1)],
    ids=["one", "two", "as many as may be asked"],
)
def test_a_prompt_refused_by_all_producers_is_rejected_and_not_prefilled_locally(
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


# Seen failing without the check of `start_by`: the other producer gets the request.
def test_an_expired_prompt_goes_to_no_other_producer(known):
    with PairRig(known.loaded, prefill=[Size(), Size()]) as rig:
        _, other = rig.prefill
        (decode,) = rig.decode
        rig.wires.hold_back(HandoffFailed)
        begun = time.monotonic()
        asked = rig.ask(LONG, queue_s=4.0)  # reaches the producer in time even on a slow machine
        _refuse(rig, [0])
        rig.let_time_pass(begun + 4.1)
        rig.wires.release()
        rig.run()
        _assert_refused(asked)
        assert other.queue("bootstrap") == 0 and decode.count("handoffs_opened") == 1
        assert decode.count("local_prefills") == 0
