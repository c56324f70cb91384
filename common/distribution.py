"""Histogram counts of a measured value, and the bucket bounds of engine metrics.

One thread writes, at some hundred nanoseconds per value, and any thread reads. Frozen copies are
sent between processes. The counting and the exporting process share the bounds.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from math import inf
from operator import add, sub

import msgspec

STEP_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08),
    *(0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24),
)
BATCH_REQUESTS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
BATCH_TOKENS = (16.0, 64.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0)
RUN_TOKENS = tuple(float(num_tokens) for num_tokens in range(1, 17))
READ_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
HANDOFF_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class HistogramCounts(msgspec.Struct, frozen=True):
    """Counts of a histogram.

    `counts[i]` counts values up to `bounds[i]` and above the previous bound. The last count is for
    values above all bounds. `total` is the sum of the values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        return sum(self.counts)

    def plus(self, other: "HistogramCounts") -> "HistogramCounts":
        """Return the sum of two counts with equal bounds."""
        counts = tuple(map(add, self.counts, other.counts))
        return HistogramCounts(self.bounds, counts, self.total + other.total)

    def minus(self, earlier: "HistogramCounts") -> "HistogramCounts":
        """Return the counts of the values added since `earlier`."""
        counts = tuple(map(sub, self.counts, earlier.counts))
        return HistogramCounts(self.bounds, counts, self.total - earlier.total)

    def coarser(self, bounds: tuple[float, ...]) -> "HistogramCounts":
        """Return the counts for fewer bounds, each of which is one of `self.bounds`."""
        edges = [0, *(self.bounds.index(bound) + 1 for bound in bounds), len(self.counts)]
        counts = tuple(sum(self.counts[first:end]) for first, end in pairwise(edges))
        return HistogramCounts(bounds, counts, self.total)

    def quantile(self, share: float) -> float:
        """Return an estimate of the quantile, by linear interpolation between two bounds.

        It is at most the highest bound, and 0 without values.
        """
        left = share * self.count
        for lower, upper, count in zip((0.0, *self.bounds), self.bounds, self.counts, strict=False):
            if count and left <= count:
                return lower + (upper - lower) * left / count
            left -= count
        return self.bounds[-1] if self.count else 0.0


class LiveHistogram:
    """A histogram that one thread writes.

    Args:
        bounds: upper bounds of the buckets, ascending.
    """

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def add_all(self, values: Sequence[float]) -> None:
        """Add several values, at a tenth of the cost of single calls."""
        ordered = sorted(values)
        below = 0
        for index, bound in enumerate((*self._bounds, inf)):
            upto = bisect_right(ordered, bound)
            self._counts[index] += upto - below
            below = upto
        self._total += sum(ordered)

    def counted(self) -> HistogramCounts:
        return HistogramCounts(self._bounds, tuple(self._counts), self._total)
