"""Metrics of the images that an engine encodes."""

from collections.abc import Mapping

from common.distribution import HistogramCounts
from engine.models.vision.seeing import VisionTower


class VisionMetrics:
    """Image metrics, see Meter."""

    def __init__(self, seeing: VisionTower | None) -> None:
        self._seeing = seeing

    def gauges(self) -> Mapping[str, float]:
        if self._seeing is None:
            return {}
        counts = self._seeing.counts
        return {
            "image_bytes": float(self._seeing.num_bytes),
            "total_images/encoded": float(counts.encoded),
            "total_images/kept": float(counts.found),
            "total_image_seconds": counts.seconds,
        }

    def distributions(self) -> Mapping[str, HistogramCounts]:
        return {}
