"""Counters of a reader's reads, by the path that carried them.

Written by the transfer thread, read by any other. So the entries of all paths exist from the start.
"""

from common import distribution
from common.distribution import HistogramCounts, LiveHistogram

PATHS = ("nvlink", "cuda_ipc", "rdma", "cma", "tcp")


class _Path:
    __slots__ = ("num_bytes", "num_descriptors", "num_refused", "seconds")

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_descriptors = 0
        self.num_refused = 0
        self.seconds = LiveHistogram(distribution.READ_S)


class ReadMetrics:
    """Counters of reads and of compared pages.

    Args:
        page_bytes: moved by one descriptor.
    Attributes:
        in_flight: reads given to links and not ended.
    """

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._paths = {name: _Path() for name in PATHS}
        self.in_flight = 0
        self._compared = {"passed": 0, "failed": 0}  # pages

    def ended(self, path: str, num_bytes: int, seconds: float, *, refused: bool) -> None:
        """Count one ended read of a link. A path that is not in PATHS is not counted."""
        of_path = self._paths.get(path)
        if of_path is None:
            return
        if refused:
            of_path.num_refused += 1
            return
        of_path.num_bytes += num_bytes
        of_path.num_descriptors += num_bytes // self._page_bytes
        of_path.seconds.add(seconds)

    def compared(self, *, right: int, wrong: int) -> None:
        """Count pages that were compared by checksum."""
        self._compared["passed"] += right
        self._compared["failed"] += wrong

    def gauges(self) -> dict[str, float]:
        gauges = {"reads_in_flight": float(self.in_flight)}
        for name, number in self._compared.items():
            gauges[f"total_pages_compared/{name}"] = float(number)
        for name, path in self._paths.items():
            gauges[f"total_read_bytes/{name}"] = float(path.num_bytes)
            gauges[f"total_read_descriptors/{name}"] = float(path.num_descriptors)
            gauges[f"total_reads_refused/{name}"] = float(path.num_refused)
        return gauges

    def distributions(self) -> dict[str, HistogramCounts]:
        return {
            f"read_seconds/{name}": path.seconds.counted() for name, path in self._paths.items()
        }
