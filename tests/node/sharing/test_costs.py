"""The choice between reading and computing, from measurements."""

import pytest

from node.sharing.costs import BELIEVED_S, FIRST_ROUND_S, GIB, WEIGHT, PrefixReadCosts

PRODUCER = 7


def read_s(costs: PrefixReadCosts, *, num_bytes: int = 0, gib_per_s: float = 1.0, **how) -> float:
    fields = {"num_reads": 0, "now": 0.0, **how}
    return costs.read_s(PRODUCER, num_bytes, gib_per_s, **fields)


def test_reads_of_a_link_share_its_rate() -> None:
    costs = PrefixReadCosts(0.7)
    assert read_s(costs, num_bytes=GIB) == pytest.approx(1.0 + FIRST_ROUND_S)
    assert read_s(costs, num_bytes=GIB, num_reads=2) == pytest.approx(3.0 + FIRST_ROUND_S)
    assert read_s(costs, num_bytes=GIB, gib_per_s=0.0) == pytest.approx(100.0 + FIRST_ROUND_S)


def test_the_additional_latency_of_a_producer_is_learnt_and_unlearnt() -> None:
    costs = PrefixReadCosts(0.7)
    costs.learn(PRODUCER, GIB, 1.0, 2.0, now=10.0)  # a second more than its bytes take
    learnt = FIRST_ROUND_S + WEIGHT * (1.0 - FIRST_ROUND_S)
    assert read_s(costs, now=11.0) == pytest.approx(learnt)
    assert read_s(costs, now=10.0 + BELIEVED_S) == FIRST_ROUND_S
    costs.learn(PRODUCER, GIB, 1.0, 0.5, now=90.0)  # faster than measured before
    assert read_s(costs, now=90.0) == pytest.approx(FIRST_ROUND_S * (1 - WEIGHT))
    costs.forget(PRODUCER)
    assert read_s(costs, now=90.0) == FIRST_ROUND_S


@pytest.mark.parametrize(
    "seconds, tokens, token_s, queued_s, pays",
    [
        (0.6, 100, 0.01, 0.0, True),
        (0.8, 100, 0.01, 0.0, False),  # cheaper, but not by the margin
        (0.8, 100, 0.01, 0.2, True),  # reading, while the prompt waits in the queue
        (0.8, 100, 0.0, 9.0, False),  # the duration of computation is unknown
    ],
)
def test_reading_is_chosen_if_cheaper_by_a_margin(
    seconds: float, tokens: int, token_s: float, queued_s: float, pays: bool
) -> None:
    assert PrefixReadCosts(0.7).pays(seconds, tokens, token_s=token_s, queued_s=queued_s) is pays
