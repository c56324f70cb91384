"""Histogram counts of a measured value.

One thread writes, at some hundred nanoseconds per value, and any thread reads. A frozen copy is
sent between processes.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from math import inf
from operator import add, sub

import msgspec


class HistogramCounts(msgspec.Struct, frozen=True):
    """Counts of a histogram.

    `counts[i]` values were at most `bounds[i]` and above the bound before. The last count is of
    values above all bounds. `total` is the sum of the values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        return sum(self.counts)

    def plus(self, other: "HistogramCounts") -> "HistogramCounts":
        """Return the counts of both, which have the same bounds."""
        counts = tuple(map(add, self.counts, other.counts))
        return HistogramCounts(self.bounds, counts, self.total + other.total)

    def minus(self, earlier: "HistogramCounts") -> "HistogramCounts":
        """Return the counts of the values added since `earlier`."""
        counts = tuple(map(sub, self.counts, earlier.counts))
        return HistogramCounts(self.bounds, counts, self.total - earlier.total)

    def coarser(self, bounds: tuple[float, ...]) -> "HistogramCounts":
        """Return the same values counted by fewer bounds, each of which is one of `self.bounds`."""
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
    """A histogram.

    Args:
        bounds: ascending.
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
