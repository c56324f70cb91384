"""The engine thread's side of Node.WatchCache: who watches the prefix cache, and what they hear.

Changes go to all watchers once a step. Who begins to watch gets everything first; the front passes
changes on only to those that have had it. Knows no streams.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

from common.node.messages import CacheChanged, WatchCache

MAX_PAGES_PER_MESSAGE = 1 << 15
ALL_WATCHERS = 0


class Change(Protocol):
    """A change of the cache: what was told before is void, if `cleared`; pages by name."""

    @property
    def cleared(self) -> bool: ...

    @property
    def stored(self) -> Sequence[int]: ...

    @property
    def removed(self) -> Sequence[int]: ...


class CacheSource(Protocol):
    """The prefix cache of an engine; see common/engine/cache_events.py."""

    page_size: int

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def everything(self) -> Change: ...

    def take(self) -> Change | None: ...


class CacheReports:
    """Engine thread only."""

    def __init__(self, cache: CacheSource, post: Callable[[CacheChanged], None]) -> None:
        self._cache = cache
        self._post = post
        self._watchers: set[int] = set()

    def watch(self, message: WatchCache) -> None:
        """A watcher comes or goes."""
        if not message.on:
            self._watchers.discard(message.watcher)
            if not self._watchers:
                self._cache.stop()
            return
        if not self._watchers:
            self._cache.start()
        # What waits for the next flush is in everything too: telling it twice does no harm.
        self._watchers.add(message.watcher)
        self._tell(message.watcher, self._cache.everything())

    def flush(self) -> None:
        """Tells what has changed. Costs next to nothing without watchers."""
        if self._watchers:
            change = self._cache.take()
            if change is not None:
                self._tell(ALL_WATCHERS, change)

    def _tell(self, watcher: int, change: Change) -> None:
        """In as many messages as it takes; nothing that is removed was stored in the same change,
        so the order does not matter."""
        most = MAX_PAGES_PER_MESSAGE
        longest = max(len(change.stored), len(change.removed))
        for start in range(0, longest or 1, most):
            self._post(
                CacheChanged(
                    watcher,
                    self._cache.page_size,
                    change.cleared and not start,
                    array("Q", change.stored[start : start + most]).tobytes(),
                    array("Q", change.removed[start : start + most]).tobytes(),
                )
            )
