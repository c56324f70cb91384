"""Nodes of tools.bench.routing: real prefix caches and events, with the time of a cost model.

A prefill node computes one prompt after the other: a fixed time for each, and a time per token that
its cache lacks. A decode node has pages for a request from its first token to its last.
"""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.batch.holding import PageHolding
from engine.kv_cache.cache_events import CacheEvents
from engine.kv_cache.pages import PageAllocator, PageHolder
from engine.kv_cache.radix import PrefixCache

PAGE_SIZE = 16


@dataclass(frozen=True)
class Costs:
    """The cost model: about an 8B model on a recent GPU."""

    prompt_s: float = 0.004  # each prompt, whatever its length
    token_s: float = 1 / 12_000  # each uncached token
    step_s: float = 0.02  # each token of an answer
    handoff_s: float = 0.005  # from the end of a prefill to the first token
    events_s: float = 0.05  # delay of cache events at a router
    status_s: float = 0.5  # between two Statuses of a decode node


@dataclass(eq=False)
class Arrival:
    """One request of the trace."""

    at: float
    token_ids: "array[int]"
    session: str
    num_output: int


class PrefillNode:
    """A prefill node that computes in the order of arrival.

    Args:
        after: runs a function after a delay in seconds.
        tell: called with each change of the cache, in the form of CacheEvents.
    """

    def __init__(
        self,
        costs: Costs,
        cache_tokens: int,
        after: Callable[[float, Callable[[], None]], None],
        tell: Callable[[Sequence[int], Sequence[int]], None],
    ) -> None:
        self._costs = costs
        self._after = after
        self._tell = tell
        self._pages = PageAllocator(cache_tokens // PAGE_SIZE)
        self._cache = PrefixCache(PAGE_SIZE, self._pages)
        self._events = CacheEvents(self._cache)
        self._events.start()
        self._queue: deque[tuple[Arrival, Callable[[], None]]] = deque()
        self._busy = False
        self.busy_s = 0.0
        self.cached_tokens = 0
        self.most_queued = 0

    def submit(self, arrival: Arrival, done: Callable[[], None]) -> None:
        self._queue.append((arrival, done))
        self.most_queued = max(self.most_queued, len(self._queue))
        if not self._busy:
            self._begin()

    def _begin(self) -> None:
        if not self._queue:
            self._busy = False
            return
        self._busy = True
        arrival, done = self._queue.popleft()
        tokens = np.array(arrival.token_ids, np.int32)
        cached = self._cache.match(tokens[:-1])
        num_new = len(tokens) - cached.num_tokens
        took = self._costs.prompt_s + num_new * self._costs.token_s
        self.cached_tokens += cached.num_tokens
        self.busy_s += took
        # As in the engine: the hit is held, and the rest is allocated, which may evict.
        self._pages.hold(cached.pages, PageHolder.REQUEST)
        fresh = self._cache.allocate(-(-num_new // PAGE_SIZE), PageHolder.REQUEST)
        if fresh is None:
            raise RuntimeError("a prompt does not fit into the cache of a node")
        pages = np.concatenate([cached.pages, fresh])
        self._after(took, lambda: self._finish(tokens, pages, done))

    def _finish(self, tokens: np.ndarray, pages: np.ndarray, done: Callable[[], None]) -> None:
        self._cache.insert(tokens, PageHolding.of(pages))
        self._pages.drop(pages, PageHolder.REQUEST)
        change = self._events.take()
        if change is not None:
            self._after(self._costs.events_s, lambda: self._tell(change.stored, change.removed))
        done()
        self._begin()


class DecodeNode:
    """A decode node with its current and average pages in use."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.used = 0
        self._area = 0.0
        self._since = 0.0

    def change(self, num_pages: int, now: float) -> None:
        self._area += self.used * (now - self._since)
        self._since = now
        self.used += num_pages

    def mean_used(self, now: float) -> float:
        return (self._area + self.used * (now - self._since)) / now
