"""Round-robin policy: nodes take turns, and so do pairs of nodes."""

import math
from collections.abc import Sequence

from router.policy.choices import DecodeChoice, PlacementDecision, PlacementKey


class RoundRobin:
    """The round-robin policy. It considers nothing else."""

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
