"""Prefix hints: other nodes that hold more of a prompt than the node that will compute it.

Hints come from the nodes' cache events. The computing node may fetch the prefix there. A wrong or
late hint costs it one request at most.
"""

from common.addresses import MAX_HINTS, PrefixHint
from router.policy.choices import PlacementDecision, PlacementKey
from router.policy.prefix_index import PrefixIndex, PromptPrefixes

LEAST_TOKENS = 64  # minimum advantage over the computing node; a shorter fetch is not worthwhile
MOST = MAX_HINTS - 1  # a decode node adds itself


class PrefixHints:
    """Prefix hints from the prefix index. For one event loop."""

    def __init__(self, prefixes: PrefixIndex) -> None:
        self._prefixes = prefixes

    def of(self, key: PlacementKey, placement: PlacementDecision) -> tuple[PrefixHint, ...]:
        """Return the hints, longest prefix first."""
        computes = placement.prefill[0] if placement.prefill else placement.decode
        known = self._prefixes.telling() - {computes, placement.decode}
        if not known:
            return ()
        prompt = PromptPrefixes(key.token_ids, key.namespace)
        least = self._prefixes.told_tokens(prompt, computes) + LEAST_TOKENS
        told = ((self._prefixes.told_tokens(prompt, address), address) for address in known)
        most = sorted(((has, address) for has, address in told if has >= least), reverse=True)
        return tuple(PrefixHint(address, has) for has, address in most[:MOST])
