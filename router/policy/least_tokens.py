"""Least-loaded policy: the prefill node with the fewest tokens to compute, ignoring caches."""

from collections.abc import Sequence

from router.policy.choices import DecodeChoice, PlacementDecision, PlacementKey
from router.policy.decode_choice import LeastLoadedDecode
from router.policy.load import NodeLoad
from router.policy.rotating_order import RotatingOrder


class LeastTokens:
    """The least-tokens policy. Equal nodes take turns."""

    def __init__(self, load: NodeLoad) -> None:
        self._load = load
        self._decode = LeastLoadedDecode(load)
        self._turns = RotatingOrder()

    def pick(self, key: PlacementKey, choices: Sequence[DecodeChoice]) -> PlacementDecision:
        decode = self._decode.pick(choices)
        nodes = self._turns.rotated([node.address for node in decode.prefill])
        nodes.sort(key=self._load.prefill.tokens)
        return PlacementDecision(decode.address, tuple(nodes), len(key.token_ids))
