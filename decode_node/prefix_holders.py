"""Nodes that hold part of a prompt, by this node's own cache and by the router's hints."""

from common.requests.prefix_hint import MAX_HINTS, PrefixHint
from engine.batch.request import Request
from engine.kv_cache.radix import PrefixCache
from engine.offload.cache_tiers import CacheTiers
from node.messages import Placement

WORTH_NAMING_TOKENS = 64  # shorter cached prefixes are not offered to other nodes


class PrefixLocations:
    """Prefix hints for hand-offs. Engine thread only.

    Args:
        shares: whether nodes fetch prefixes from each other. If not, there are no hints.
    """

    def __init__(self, cache: PrefixCache, tiers: CacheTiers, *, shares: bool) -> None:
        self._cache = cache
        self._tiers = tiers
        self._shares = shares

    def of(self, request: Request, placement: Placement) -> tuple[PrefixHint, ...]:
        """Return this node, if it holds enough of the prompt, then the router's hints."""
        if not self._shares:
            return ()
        if not placement.own_address or len(request.token_ids) < WORTH_NAMING_TOKENS:
            return placement.prefix_hints
        wanted = request.token_ids, request.namespace
        way = self._tiers.way(*wanted)
        num_tokens = self._cache.match(*wanted).num_tokens if way is None else len(way.token_ids)
        if num_tokens < WORTH_NAMING_TOKENS:
            return placement.prefix_hints
        return (PrefixHint(placement.own_address, num_tokens), *placement.prefix_hints)[:MAX_HINTS]
