"""Round-robin: every node and every pair in turn, unusable ones left out."""

from collections import Counter

import pytest

from router.policy import DecodeChoice, Placement, RoundRobin


def choice(address: str, *prefill: str) -> DecodeChoice:
    return DecodeChoice(address, prefill, num_live=0)


@pytest.mark.parametrize("num_prefill, num_decode", [(1, 1), (2, 2), (3, 2), (2, 3), (4, 2)])
def test_every_pair_is_picked_equally_often(num_prefill: int, num_decode: int) -> None:
    prefill = [f"p{number}" for number in range(num_prefill)]
    decode = [f"d{number}" for number in range(num_decode)]
    policy = RoundRobin(prefill, decode)
    choices = [choice(address, *prefill) for address in decode]
    num_pairs = num_prefill * num_decode
    picked = [policy.pick([1], choices) for _ in range(3 * num_pairs)]
    assert set(Counter((p.decode, p.prefill[0]) for p in picked).values()) == {3}
    assert len({p.decode for p in picked[:num_decode]}) == num_decode
    assert all(sorted(p.prefill) == prefill for p in picked)


def test_candidates_are_the_rotation_without_those_the_decode_node_cannot_read_from() -> None:
    policy = RoundRobin(["p0", "p1", "p2"], ["d0"])
    picked = [policy.pick([1], [choice("d0", "p2", "p0")]).prefill for _ in range(3)]
    assert picked == [("p0", "p2"), ("p2", "p0"), ("p2", "p0")]


def test_a_node_that_is_no_choice_is_skipped() -> None:
    policy = RoundRobin(["p0"], ["d0", "d1"])
    picked = {policy.pick([1], [choice("d1", "p0")]).decode for _ in range(4)}
    assert picked == {"d1"}


def test_nodes_that_prefill_themselves_get_no_candidates() -> None:
    assert RoundRobin([], ["d0"]).pick([1], [choice("d0")]) == Placement("d0", ())
