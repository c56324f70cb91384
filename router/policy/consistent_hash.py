"""Consistent hashing: equal keys go to one prefill node, and routers agree without communication.

The key is the session, or else the namespace and the beginning of the prompt. Each node gets a
score from the key and its address, and the highest score goes first (rendezvous hashing, Thaler and
Ravishankar 1996). If a node leaves, only its keys move. A new node takes its share from each other
one. A node is passed over if its queue is a quarter longer than the mean, plus one prompt
(consistent hashing with bounded loads, Mirrokni et al. 2018). Otherwise one key could overload it.
"""

from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from common.requests.namespace import as_bytes
from router.policy.choices import DecodeChoice, PlacementDecision, PlacementKey
from router.policy.decode_choice import LeastLoadedDecode
from router.policy.load import NodeLoad

KEY_TOKENS = 256  # of the prompt: requests of one application often share them
MOST_OVER_MEAN = 1.25


class ConsistentHash:
    def __init__(self, load: NodeLoad) -> None:
        self._load = load
        self._decode = LeastLoadedDecode(load)

    def pick(self, key: PlacementKey, choices: Sequence[DecodeChoice]) -> PlacementDecision:
        decode = self._decode.pick(choices)
        num_tokens = len(key.token_ids)
        name = xxh3_64_intdigest(
            key.session_id.encode() or key.namespace + as_bytes(key.token_ids[:KEY_TOKENS])
        )
        queued = {node.address: self._load.prefill.tokens(node.address) for node in decode.prefill}
        bound = MOST_OVER_MEAN * sum(queued.values()) / max(1, len(queued)) + num_tokens
        nodes = sorted(
            queued,
            key=lambda node: (queued[node] > bound, -xxh3_64_intdigest(node.encode(), name)),
        )
        return PlacementDecision(decode.address, tuple(nodes), num_tokens)
