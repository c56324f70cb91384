"""Metrics of an engine's adapters."""

from collections.abc import Mapping

from common.distribution import HistogramCounts
from engine.adapters.adapters import AdapterManager


class AdapterMeter:
    """Adapter metrics, see Meter. Engine thread only."""

    def __init__(self, adapters: AdapterManager) -> None:
        self._adapters = adapters

    def gauges(self) -> Mapping[str, float]:
        adapters, library = self._adapters, self._adapters.library
        return {
            "adapters": float(len(library)),
            "adapter_bytes": float(library.num_bytes),
            "adapter_slots": float(adapters.num_slots_used),
            "total_adapter_fills": float(adapters.num_fills),
            "total_adapters_evicted": float(library.num_evicted),
        }

    def distributions(self) -> Mapping[str, HistogramCounts]:
        return {}
