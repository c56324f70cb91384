"""Session-affinity policy: a session stays on its nodes, which have its KV cached on both sides.

Requests without a session, and the first one of a session, go to the least-loaded nodes.
"""

from collections import OrderedDict
from collections.abc import Sequence

from router.policy.basic import LeastTokens
from router.policy.choices import DecodeChoice, PlacementDecision, PlacementKey
from router.policy.load import NodeLoad

MAX_SESSIONS = 1 << 16  # beyond that, the least recently used session is dropped


class SessionAffinity:
    def __init__(self, load: NodeLoad) -> None:
        self._least = LeastTokens(load)
        self._homes: OrderedDict[str, tuple[str, str]] = OrderedDict()  # decode, prefill

    def pick(self, key: PlacementKey, choices: Sequence[DecodeChoice]) -> PlacementDecision:
        decode, prefill = self._homes.get(key.session_id, ("", ""))
        at_home = [choice for choice in choices if choice.address == decode]
        placement = self._least.pick(key, at_home or choices)
        if prefill in placement.prefill:
            others = (node for node in placement.prefill if node != prefill)
            placement = PlacementDecision(
                placement.decode, (prefill, *others), placement.uncached_tokens
            )
        if key.session_id:
            home = placement.decode, placement.prefill[0] if placement.prefill else ""
            self._homes[key.session_id] = home
            self._homes.move_to_end(key.session_id)
            if len(self._homes) > MAX_SESSIONS:
                self._homes.popitem(last=False)
        return placement
