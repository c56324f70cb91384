"""Policies that ignore caches and sessions."""

import math
import random
from collections.abc import Sequence

from router.policy.choices import DecodeChoice, PlacementDecision, PlacementKey
from router.policy.decode_choice import LeastLoadedDecode, RotatingOrder
from router.policy.load import NodeLoad


class LeastTokens:
    """Least-loaded policy: the prefill node with the fewest tokens to compute.

    Equal nodes take turns.
    """

    def __init__(self, load: NodeLoad) -> None:
        self._load = load
        self._decode = LeastLoadedDecode(load)
        self._turns = RotatingOrder()

    def pick(self, key: PlacementKey, choices: Sequence[DecodeChoice]) -> PlacementDecision:
        decode = self._decode.pick(choices)
        nodes = self._turns.rotated([node.address for node in decode.prefill])
        nodes.sort(key=self._load.prefill.tokens)
        return PlacementDecision(decode.address, tuple(nodes), len(key.token_ids))


class PowerOfTwo:
    """Power-of-two-choices policy: of two random nodes, the one with less work.

    It balances almost as well as the least-loaded policy, and independent routers do not all choose
    the same node.

    Args:
        load: of the nodes.
        rng: source of randomness.
    """

    def __init__(self, load: NodeLoad, rng: random.Random) -> None:
        self._load = load
        self._rng = rng
        self._decode = LeastLoadedDecode(load)

    def pick(self, key: PlacementKey, choices: Sequence[DecodeChoice]) -> PlacementDecision:
        decode = self._decode.pick(self._rng.sample(choices, min(2, len(choices))))
        nodes = [node.address for node in decode.prefill]
        self._rng.shuffle(nodes)
        nodes[:2] = sorted(nodes[:2], key=self._load.prefill.tokens)
        return PlacementDecision(decode.address, tuple(nodes), len(key.token_ids))


class RandomPolicy:
    """Random policy: any node, with equal probability.

    Args:
        rng: source of randomness.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def pick(self, key: PlacementKey, choices: Sequence[DecodeChoice]) -> PlacementDecision:
        decode = self._rng.choice(choices)
        nodes = self._rng.sample(decode.prefill, len(decode.prefill))
        return PlacementDecision(
            decode.address, tuple(node.address for node in nodes), len(key.token_ids)
        )


class RoundRobin:
    """Round-robin policy: nodes take turns, and so do pairs of nodes."""

    def __init__(self) -> None:
        self._num_picked = 0

    def pick(self, key: PlacementKey, choices: Sequence[DecodeChoice]) -> PlacementDecision:
        turn = self._num_picked
        self._num_picked += 1
        decode = choices[turn % len(choices)]
        nodes = [choice.address for choice in decode.prefill]
        if nodes:
            # With equal numbers of both roles, plain rotations would always give the same pairs.
            first = (turn + turn // math.lcm(len(nodes), len(choices))) % len(nodes)
            nodes = nodes[first:] + nodes[:first]
        return PlacementDecision(decode.address, tuple(nodes), len(key.token_ids))
