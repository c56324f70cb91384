"""Fetches of cached prefixes from other nodes, for prompts to be computed here and for requests
that are about to migrate here.

    begin: pages now, or not at all --Open, Grant--> in progress --Held--> in the tree
                                                        `--Lost, late--> dropped

Fetched pages belong to the tree, not to the requests that wait for them. When a fetch ends,
successfully or not, its requests continue with what the tree has, so a fetch never fails a request.
A fetch never queues: it gets its pages at once or does not begin. It has a deadline on both sides.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from common.config import PrefixSharingConfig
from common.page_tables import PageTables, num_pages_of
from common.request import PrefixHint
from common.requests.namespace import UNNAMED, Namespace
from engine.batch.batch import Ints
from engine.batch.holding import PageHolding
from engine.kv_cache.pages import PageAllocator, PageHolder
from engine.kv_cache.radix import PrefixCache
from kvtransfer.messages import HandoffId, Prefix
from kvtransfer.ports import (
    CompletedEvent,
    FailedEvent,
    ProducerUp,
    ReadsEndedEvent,
)
from node.sharing.costs import PrefixReadCosts
from node.sharing.reads import SharedReads

LEAST_PAGES = 2  # minimum size of a fetch
# Multiple of the expected time that a fetch may take, in addition to
# PrefixSharingConfig.fetch_timeout_s.
TIMES_EXPECTED = 3.0


@dataclass(slots=True, eq=False)
class _Fetch:
    producer: ProducerUp
    token_ids: Ints  # whole pages
    namespace: Namespace
    prefix_tokens: int  # number of these tokens that are already cached here
    fresh: Ints  # pages for the data, held until no bytes can land in them
    began: float
    waiting: set[int] = field(default_factory=set)  # keys of the waiting requests


class FetchedPrefix(NamedTuple):
    num_tokens: int
    producer: int  # instance id


@dataclass(frozen=True, slots=True)
class _FetchOption:
    """A possible fetch from another node."""

    producer: ProducerUp
    num_tokens: int  # tokens from the start of the prompt
    num_pages: int
    read_s: float
    saved_s: float


class PrefixFetches:
    """The fetches of this node. Requests are named by their keys. Engine thread only.

    Attributes:
        costs: measured costs of fetches.
        keys: requests that have started a fetch or waited for one.
        waits: fetch in progress of each waiting request.
        fetched: prefixes that were fetched for requests.
        pages_in_use: held until no bytes can land in them.
        counts: results, named as in EngineStats.
    """

    def __init__(
        self,
        config: PrefixSharingConfig,
        shared: SharedReads,
        *,
        page_bytes: int,
        cache: PrefixCache,
        pages: PageAllocator,
        tables: PageTables,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._enabled = config.enabled and cache.enabled
        self._fetch_s = config.fetch_timeout_s
        self._page_bytes = page_bytes
        self._cache = cache
        self._pages = pages
        self._tables = tables
        self._shared = shared
        self.costs = PrefixReadCosts(config.max_cost_ratio)
        self.keys: set[int] = set()
        self.open: dict[HandoffId, _Fetch] = {}
        self.pages_in_use: dict[HandoffId, Ints] = {}
        self.waits: dict[int, HandoffId] = {}
        self._over: dict[int, None] = {}  # keys to be returned by take_over
        self.fetched: dict[int, FetchedPrefix] = {}
        outcomes = ("completed", "failed", "too_expensive", "no_capacity", "unpaired")
        self.counts = dict.fromkeys((f"prefix_fetches/{outcome}" for outcome in outcomes), 0)

    @property
    def busy(self) -> bool:
        return bool(self.open or self.pages_in_use)

    def start(
        self,
        key: int,
        token_ids: Ints,
        namespace: Namespace,
        hints: Sequence[PrefixHint],
        *,
        room: int,
        token_s: float,
        queued_s: float,
    ) -> bool:
        """Start to fetch another node's part of a prompt if that is cheaper than computing it, or
        wait for a fetch of the same prefix. Returns True if `take_over` will return the key.

        Args:
            room: pages that may be used now.
            token_s: seconds per computed token here. 0.0: unknown.
            queued_s: seconds until this prompt would be scheduled.
        """
        if not self._enabled or not hints:
            return False
        wanted = token_ids[:-1]  # the last token is always computed, because its logits are needed
        own = self._cache.match(wanted, namespace).num_tokens
        now = self._clock()
        option = self._cheapest(hints, len(wanted), own, token_s, queued_s, now)
        if option is None:
            return False
        return self._wait(key, option, wanted, namespace, own, room, now)

    def copy(
        self,
        key: int,
        token_ids: Ints,
        namespace: Namespace,
        address: str,
        ticket: int,
        *,
        room: int,
    ) -> bool:
        """Start to copy the KV of a request that runs on another node and is to migrate here. It
        keeps running meanwhile and stops only for the rest, so the copy is worth any cost. Returns
        True if `take_over` will return the key.

        Args:
            token_ids: tokens known to have KV there.
            room: pages that may be used now.
        """
        producer = self._shared.producers.get(address)
        if not self._enabled or producer is None:
            return False
        own = self._cache.match(token_ids, namespace).num_tokens
        end = len(token_ids) // self._tables.page_size * self._tables.page_size
        if end - own < LEAST_PAGES * self._tables.page_size:
            return False
        now = self._clock()
        option = self._option(producer, own, end, 0.0, now)
        return self._wait(key, option, token_ids, namespace, own, room, now, ticket)

    def take_over(self) -> list[int]:
        """Return the keys whose fetch has ended since the last call, successfully or not."""
        over, self._over = self._over, {}
        return list(over)

    def forget(self, key: int) -> None:
        """Forget a request. Its fetch continues, for the tree."""
        self.keys.discard(key)
        self.fetched.pop(key, None)
        self._over.pop(key, None)
        handoff_id = self.waits.pop(key, None)
        if handoff_id is not None:
            self.open[handoff_id].waiting.discard(key)

    def _cheapest(
        self,
        hints: Sequence[PrefixHint],
        num_tokens: int,
        own: int,
        token_s: float,
        queued_s: float,
        now: float,
    ) -> _FetchOption | None:
        """Return the cheapest fetch, or None if computing is cheaper or no paired node has much
        more of the prompt.
        """
        options, much = [], False
        for hint in hints:
            end = min(hint.num_tokens, num_tokens) // self._tables.page_size
            end *= self._tables.page_size
            if end - own < LEAST_PAGES * self._tables.page_size:
                continue
            much = True
            producer = self._shared.producers.get(hint.address)
            if producer is not None:
                options.append(self._option(producer, own, end, token_s, now))
        if not options:
            self.counts["prefix_fetches/unpaired"] += much
            return None
        best = max(options, key=lambda option: option.saved_s)
        num_fresh = best.num_tokens - own
        if not self.costs.pays(best.read_s, num_fresh, token_s=token_s, queued_s=queued_s):
            self.counts["prefix_fetches/too_expensive"] += 1
            return None
        return best

    def _option(
        self, producer: ProducerUp, own: int, end: int, token_s: float, now: float
    ) -> _FetchOption:
        num_pages = num_pages_of(self._tables.handed_over(end, own))
        num_reads = sum(
            fetch.producer.instance == producer.instance for fetch in self.open.values()
        )
        num_bytes = num_pages * self._page_bytes
        read_s = self.costs.read_s(producer.instance, num_bytes, producer.gib_per_s, num_reads, now)
        return _FetchOption(producer, end, num_pages, read_s, (end - own) * token_s - read_s)

    def _wait(
        self,
        key: int,
        option: _FetchOption,
        token_ids: Ints,
        namespace: Namespace,
        own: int,
        room: int,
        now: float,
        ticket: int = 0,
    ) -> bool:
        """Wait for a fetch of this prefix, in progress or new. Returns False if pages are short."""
        tokens = token_ids[: option.num_tokens]
        handoff_id = self._in_progress(tokens, namespace)
        if handoff_id is None:
            handoff_id = self._open(option, tokens, namespace, own, room, now, ticket)
        if handoff_id is None:
            self.counts["prefix_fetches/no_capacity"] += 1
            return False
        self.open[handoff_id].waiting.add(key)
        self.waits[key] = handoff_id
        self.keys.add(key)
        self._over.pop(key, None)  # of an earlier fetch
        return True

    def _in_progress(self, tokens: Ints, namespace: Namespace) -> HandoffId | None:
        for handoff_id, fetch in self.open.items():
            if fetch.namespace == namespace and np.array_equal(fetch.token_ids, tokens):
                return handoff_id
        return None

    def _open(
        self,
        option: _FetchOption,
        tokens: Ints,
        namespace: Namespace,
        own: int,
        room: int,
        now: float,
        ticket: int,
    ) -> HandoffId | None:
        """Start a fetch. Returns None if pages are short."""
        num_pages = self._tables.room_pages(len(tokens), own)
        if num_pages > room:
            return None
        opened = self._shared.open(
            option.producer,
            Prefix(tokens.tobytes(), namespace, ticket),
            UNNAMED,  # the namespace includes the weight version
            self._fetch_s + TIMES_EXPECTED * option.read_s,
            num_pages,
            prefix_tokens=own,
        )
        if opened is None:
            return None
        handoff_id, fresh = opened
        self.pages_in_use[handoff_id] = fresh
        self.open[handoff_id] = _Fetch(option.producer, tokens, namespace, own, fresh, now)
        return handoff_id

    def held(self, event: CompletedEvent) -> None:
        """Insert the fetched tokens into the tree."""
        fetch = self._ended(event.id, "completed")
        tables, end, prefix = self._tables, event.num_tokens, fetch.prefix_tokens
        tokens = fetch.token_ids[:end]
        here = self._cache.match(tokens, fetch.namespace).shared[:, : prefix // tables.page_size]
        if here.shape[1] * tables.page_size < prefix:
            return  # the prefix before them was evicted meanwhile
        num_pages = num_pages_of(tables.handed_over(end, prefix))
        holding = PageHolding.laid_out(tables, here, fetch.fresh[:num_pages], end)
        self._cache.insert(tokens, holding, fetch.namespace, state=holding.state)
        for key in fetch.waiting:
            self.fetched[key] = FetchedPrefix(end - prefix, fetch.producer.instance)

    def lost(self, event: FailedEvent) -> None:
        self._ended(event.id, "failed")

    def reads_ended(self, event: ReadsEndedEvent) -> None:
        self._pages.drop(self.pages_in_use.pop(event.id), PageHolder.READ)

    def _ended(self, handoff_id: HandoffId, outcome: str) -> _Fetch:
        fetch = self.open.pop(handoff_id)
        self.counts[f"prefix_fetches/{outcome}"] += 1
        producer, now = fetch.producer, self._clock()
        num_bytes = len(fetch.fresh) * self._page_bytes
        self.costs.learn(producer.instance, num_bytes, producer.gib_per_s, now - fetch.began, now)
        for key in fetch.waiting:
            del self.waits[key]
        self._over |= dict.fromkeys(fetch.waiting)
        return fetch
