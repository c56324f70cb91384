"""Metrics of the offload tiers."""

from collections.abc import Mapping

from common.distribution import HistogramCounts
from engine.offload.cache_tiers import CacheTiers
from engine.offload.page_files import FileFault


class TierMeter:
    """A meter of the offload tiers. Engine thread only. See Meter."""

    def __init__(self, tiers: CacheTiers, page_bytes: int) -> None:
        self._tiers = tiers
        self._page_bytes = page_bytes

    def gauges(self) -> Mapping[str, float]:
        tiers, host, files = self._tiers, self._tiers.host, self._tiers.files
        pages = {
            "saved": tiers.saves.num_pages,
            "brought": tiers.brought_pages,
            "written": files.num_written,
            "read": files.num_read,
        }
        return {
            "tier_pages/host": float(host.num_cached),
            "tier_pages/file": float(files.cache.num_filled),
            "total_tier_tokens/host": float(tiers.host_tokens),
            "total_tier_tokens/file": float(tiers.file_tokens),
            **{f"total_tier_bytes/{how}": float(n * self._page_bytes) for how, n in pages.items()},
            "total_tier_evicted/host": float(host.num_evicted),
            "total_tier_evicted/file": float(files.cache.num_evicted),
            **{f"total_tier_faults/{each.value}": float(files.faults[each]) for each in FileFault},
        }

    def distributions(self) -> Mapping[str, HistogramCounts]:
        return {}
