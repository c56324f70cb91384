"""The engine thread's side of Node.WatchCache: the watchers of the prefix cache, and their updates.

All watchers receive changes once a step. A new watcher first receives everything. The frontend
forwards changes only to watchers that have received that. Knows no streams.
"""

import time
from array import array
from collections.abc import Callable
from typing import Protocol

from engine.kv_cache.kv_events import CacheChange, CacheEvents, KvEventLog
from node.messages import CacheEventBatch, KvEvents, WatchCache

MAX_PAGES_PER_MESSAGE = 1 << 15
BEGIN_INTERVAL_S = 0.25  # seconds between two snapshots for new watchers, since a snapshot is long


class CacheReporter(Protocol):
    """The reports about a cache to the frontend. Engine thread only."""

    def watch(self, message: WatchCache) -> None: ...

    def flush(self) -> None:
        """Send what is new. To be called once per turn of the loop."""
        ...


class KvEventReports:
    """Sends KV events, and the reports of `reports`."""

    def __init__(
        self, log: KvEventLog, reports: CacheReporter, post: Callable[[KvEvents], None]
    ) -> None:
        self._log = log
        self._reports = reports
        self._post = post
        self.watch = reports.watch

    def flush(self) -> None:
        for payload in self._log.take():
            self._post(KvEvents(payload))
        self._reports.flush()


class CacheReports:
    """Sends cache changes to the watchers. Engine thread only."""

    def __init__(
        self,
        cache: CacheEvents,
        post: Callable[[CacheEventBatch], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._post = post
        self._now = now
        self._watchers: set[int] = set()
        self._newcomers: set[int] = set()
        self._begin_at = 0.0

    def watch(self, message: WatchCache) -> None:
        """Add or remove a watcher. Does no work otherwise, so that frequent calls do not delay
        steps.
        """
        if message.on:
            self._newcomers.add(message.watcher)
            return
        self._newcomers.discard(message.watcher)
        self._watchers.discard(message.watcher)
        if not self._watchers:
            self._cache.stop()

    def flush(self) -> None:
        """Send the changes to watchers, and everything to new ones. Costs almost nothing without
        watchers.
        """
        if self._watchers:
            change = self._cache.take()
            if change is not None:
                self._report((), change)
        if self._newcomers and self._now() >= self._begin_at:
            self._begin()

    def _begin(self) -> None:
        """Send every page to all new watchers at once. Later ones wait for the next interval."""
        if not self._watchers:
            self._cache.start()
        self._watchers |= self._newcomers
        self._report(tuple(self._newcomers), self._cache.everything())
        self._newcomers.clear()
        self._begin_at = self._now() + BEGIN_INTERVAL_S

    def _report(self, watchers: tuple[int, ...], change: CacheChange) -> None:
        """Send a change in as many messages as needed. A removed page was never stored in the same
        change, so the order does not matter.
        """
        most = MAX_PAGES_PER_MESSAGE
        longest = max(len(change.stored), len(change.removed))
        for start in range(0, longest or 1, most):
            self._post(
                CacheEventBatch(
                    watchers,
                    self._cache.page_size,
                    change.cleared and not start,
                    array("Q", change.stored[start : start + most]).tobytes(),
                    array("Q", change.removed[start : start + most]).tobytes(),
                )
            )
