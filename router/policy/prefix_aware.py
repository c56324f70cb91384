"""Prefix-aware policy: the prefill node with the longest cached prefix, unless it is too busy.

The cost of a node is its queued uncached tokens plus those of this prompt. Among the nodes whose
cost is near the lowest, the one with the longest prefix goes first. So a prompt is queued behind
others only if that takes hardly longer than recomputation elsewhere. A popular prefix does not
overload one node: when its queue is longer than the prefix, the next prompt goes to another node,
which then has the prefix too.
"""

from collections.abc import Sequence

from router.policy.choices import DecodeChoice, PlacementDecision, PlacementKey
from router.policy.decode_choice import LeastLoadedDecode, RotatingOrder
from router.policy.load import NodeLoad
from router.policy.prefix_index import PrefixIndex, PromptPrefixes

# Added to the lowest cost. This value was best in simulations (docs/benchmarks/routing.md). A
# higher value keeps more prefixes in place but lengthens queues where one prefix dominates.
NEAR_TOKENS = 512


class PrefixAware:
    """The prefix-aware policy. Equal nodes take turns."""

    def __init__(self, load: NodeLoad, prefixes: PrefixIndex) -> None:
        self._load = load
        self._prefixes = prefixes
        self._decode = LeastLoadedDecode(load)
        self._turns = RotatingOrder()

    def pick(self, key: PlacementKey, choices: Sequence[DecodeChoice]) -> PlacementDecision:
        decode = self._decode.pick(choices)
        num_tokens = len(key.token_ids)
        nodes = self._turns.rotated([node.address for node in decode.prefill])
        if len(nodes) < 2:
            return PlacementDecision(decode.address, tuple(nodes), num_tokens)
        prefixes = PromptPrefixes(key.token_ids, key.namespace)
        # The last token is always computed, for its logits.
        cached = [
            min(self._prefixes.cached_tokens(prefixes, node), num_tokens - 1) for node in nodes
        ]
        costs = [
            self._load.prefill.tokens(node) - has for node, has in zip(nodes, cached, strict=True)
        ]
        near = min(costs) + NEAR_TOKENS
        order = sorted(
            range(len(nodes)),
            key=lambda i: (0, -cached[i], costs[i]) if costs[i] <= near else (1, costs[i], 0),
        )
        first = order[0]
        self._prefixes.placed(prefixes, nodes[first])
        return PlacementDecision(
            decode.address, tuple(nodes[i] for i in order), num_tokens - cached[first]
        )
