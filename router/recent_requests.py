"""Rejections, errors and latencies of the last minute."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from common.distribution import HistogramCounts

WINDOW_S = 60.0
SAMPLE_S = 2.0


class RequestCounts(NamedTuple):
    """Counts of requests.

    Attributes:
        rejected: requests that got status 429.
        failed: accepted requests that ended with an error, and requests that no node could take.
        ttft: by the bounds `LATENCY_S`, like `itl`.
    """

    rejected: int
    failed: int
    ttft: HistogramCounts
    itl: HistogramCounts

    def plus(self, other: "RequestCounts") -> "RequestCounts":
        return RequestCounts(
            self.rejected + other.rejected,
            self.failed + other.failed,
            self.ttft.plus(other.ttft),
            self.itl.plus(other.itl),
        )

    def minus(self, earlier: "RequestCounts") -> "RequestCounts":
        return RequestCounts(
            self.rejected - earlier.rejected,
            self.failed - earlier.failed,
            self.ttft.minus(earlier.ttft),
            self.itl.minus(earlier.itl),
        )


class RecentRequests:
    """The counts of the last minute of one process, from counts that only grow.

    `run` samples the counts. For one event loop.
    """

    def __init__(
        self, counts: Callable[[], RequestCounts], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._counts = counts
        self._clock = clock
        self._samples = deque([(clock(), counts())], maxlen=int(WINDOW_S / SAMPLE_S))

    async def run(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            self.sample()

    def sample(self) -> None:
        self._samples.append((self._clock(), self._counts()))

    def now(self) -> tuple[float, RequestCounts]:
        """Return the length of the window in seconds, and its counts."""
        began, earlier = self._samples[0]
        return self._clock() - began, self._counts().minus(earlier)
