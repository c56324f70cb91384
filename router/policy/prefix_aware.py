"""The prefill node that has most of the prompt already, unless that node is too busy.

The cost of a node is what it will have computed when this prompt is done: the uncached tokens
queued there, and this prompt's own. Of the nodes whose cost is near the least the one with the
longest prefix goes first. So a prompt waits behind others only where that takes hardly longer than
computing it anew elsewhere, and a popular prefix makes no hot spot: as soon as its node's queue is
longer than the prefix, the next prompt goes elsewhere, and that node has the prefix from then on.
"""

from collections.abc import Sequence

from router.policy.choices import DecodeChoice, Placement, PlacementKey
from router.policy.decode_choice import LeastFull
from router.policy.load import Load
from router.policy.prefix_index import PrefixIndex, PromptPrefixes
from router.policy.rotating_order import Turns

# Above the least cost: what tools.bench.routing likes best. More keeps more prefixes where they are
# and makes queues longer where one of them dominates.
NEAR_TOKENS = 512


class PrefixAware:
    """Takes equals in turn."""

    def __init__(self, load: Load, prefixes: PrefixIndex) -> None:
        self._load = load
        self._prefixes = prefixes
        self._decode = LeastFull(load)
        self._turns = Turns()

    def pick(self, key: PlacementKey, choices: Sequence[DecodeChoice]) -> Placement:
        decode = self._decode.pick(choices)
        num_tokens = len(key.token_ids)
        nodes = self._turns.rotated([node.address for node in decode.prefill])
        if len(nodes) < 2:
            return Placement(decode.address, tuple(nodes), num_tokens)
        prefixes = PromptPrefixes(key.token_ids, key.namespace)
        # The last token is always computed: its logits are wanted.
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
        return Placement(decode.address, tuple(nodes[i] for i in order), num_tokens - cached[first])
