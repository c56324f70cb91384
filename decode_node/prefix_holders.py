"""Who holds some of a prompt, for whoever computes it: this node by its own books, and others by
what the router knows."""

from common.requests.prefix_hint import MAX_HINTS, PrefixAt
from engine.batch.request import Request
from engine.kv_cache.radix import RadixCache
from engine.offload.tiers import Tiers
from node.messages import Placement

WORTH_NAMING_TOKENS = 64  # of a prompt, that this node has: for less nobody reads here


class PrefixHolders:
    """Engine thread only.

    Args:
        shares: whether nodes read prefixes of each other; else there is nothing to be told.
    """

    def __init__(self, cache: RadixCache, tiers: Tiers, *, shares: bool) -> None:
        self._cache = cache
        self._tiers = tiers
        self._shares = shares

    def of(self, request: Request, placement: Placement) -> tuple[PrefixAt, ...]:
        """Whoever has most of it by this node's own books, then those that the router names."""
        if not self._shares:
            return ()
        if not placement.own_address or len(request.token_ids) < WORTH_NAMING_TOKENS:
            return placement.prefix_hints
        wanted = request.token_ids, request.namespace
        way = self._tiers.way(*wanted)
        num_tokens = self._cache.match(*wanted).num_tokens if way is None else len(way.token_ids)
        if num_tokens < WORTH_NAMING_TOKENS:
            return placement.prefix_hints
        return (PrefixAt(placement.own_address, num_tokens), *placement.prefix_hints)[:MAX_HINTS]
