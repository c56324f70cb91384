"""Random policy: any node, with equal probability."""

import random
from collections.abc import Sequence

from router.policy.choices import DecodeChoice, PlacementDecision, PlacementKey


class RandomPolicy:
    """The random policy.

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
