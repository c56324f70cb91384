"""What is counted of the tiers below the prefix cache."""

from collections.abc import Mapping

from common.distribution import Counted
from common.engine.tiers.tiers import Tiers


class TierMeter:
    """Engine thread only. See Meter."""

    def __init__(self, tiers: Tiers, page_bytes: int) -> None:
        self._tiers = tiers
        self._page_bytes = page_bytes

    def gauges(self) -> Mapping[str, float]:
        tiers, host = self._tiers, self._tiers.host
        return {
            "tier_pages": float(host.num_cached),
            "total_tier_tokens/host": float(tiers.brought_tokens),
            "total_tier_bytes/saved": float(tiers.saves.num_pages * self._page_bytes),
            "total_tier_bytes/brought": float(tiers.brought_pages * self._page_bytes),
            "total_tier_evicted": float(host.num_evicted),
        }

    def distributions(self) -> Mapping[str, Counted]:
        return {}
