"""Power-of-two-choices policy: of two random nodes, the one with less work.

It balances almost as well as the least-loaded policy, and independent routers do not all choose the
same node.
"""

import random
from collections.abc import Sequence

from router.policy.choices import DecodeChoice, PlacementDecision, PlacementKey
from router.policy.decode_choice import LeastLoadedDecode
from router.policy.load import NodeLoad


class PowerOfTwo:
    """The power-of-two policy.

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
