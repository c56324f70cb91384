"""Which other nodes have more of a prompt than the one that is going to compute it, as they have
told: that one may read it there. What is wrong or late costs it a question at most.
"""

from common.requests.prefix_hint import MAX_HINTS, PrefixAt
from router.policy.choices import Placement, PlacementKey
from router.policy.prefix_index import PrefixIndex, PromptPrefixes

LEAST_TOKENS = 64  # more than that one has; for less nobody reads
MOST = MAX_HINTS - 1  # a decode node names itself


class PrefixHints:
    """For one event loop."""

    def __init__(self, prefixes: PrefixIndex) -> None:
        self._prefixes = prefixes

    def of(self, key: PlacementKey, placement: Placement) -> tuple[PrefixAt, ...]:
        """Those who have most of it first."""
        computes = placement.prefill[0] if placement.prefill else placement.decode
        known = self._prefixes.telling() - {computes, placement.decode}
        if not known:
            return ()
        prompt = PromptPrefixes(key.token_ids, key.namespace)
        least = self._prefixes.told_tokens(prompt, computes) + LEAST_TOKENS
        told = ((self._prefixes.told_tokens(prompt, address), address) for address in known)
        most = sorted(((has, address) for has, address in told if has >= least), reverse=True)
        return tuple(PrefixAt(address, has) for has, address in most[:MOST])
