"""Least-loaded policy: the prefill node with the fewest tokens to compute, ignoring caches."""

from collections.abc import Sequence

from router.policy.choices import DecodeChoice, Placement, PlacementKey
from router.policy.decode_choice import LeastFull
from router.policy.load import Load
from router.policy.rotating_order import Turns


class LeastTokens:
    """The least-tokens policy. Equal nodes take turns."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._decode = LeastFull(load)
        self._turns = Turns()

    def pick(self, key: PlacementKey, choices: Sequence[DecodeChoice]) -> Placement:
        decode = self._decode.pick(choices)
        nodes = self._turns.rotated([node.address for node in decode.prefill])
        nodes.sort(key=self._load.prefill.tokens)
        return Placement(decode.address, tuple(nodes), len(key.token_ids))
