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


@dataclass(frozen=True, slots=True, eq=False)
class _FetchOption:
    """A possible fetch from another node."""

    producer: ProducerUp
    token_ids: Ints  # from the start of the prompt, whole pages
    namespace: Namespace
    prefix_tokens: int  # number of these tokens that are already cached here
    read_s: float  # expected seconds until the pages are here
    ticket: int = 0  # of the request that the producer runs


@dataclass(slots=True, eq=False)
class _Fetch:
    option: _FetchOption
    fresh: Ints  # pages for the data, held until no bytes can land in them
    began: float
    waiting: set[int] = field(default_factory=set)  # keys of the waiting requests


class FetchedPrefix(NamedTuple):
    num_tokens: int
    producer: int  # instance id


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
        option = self._cheapest(hints, wanted, namespace, token_s, queued_s)
        return option is not None and self._wait(key, option, room)

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
        end = self._end_of_fetch(len(token_ids), own)
        if not end:
            return False
        return self._wait(
            key, self._option(producer, token_ids[:end], namespace, own, ticket), room
        )

    def take_over(self) -> list[int]:
        """Return the keys whose fetch has ended since the last call, successfully or not."""
        over, self._over = self._over, {}
        return list(over)

    def forget(self, key: int) -> None:
        """Forget a request of `keys`. Its fetch continues, for the tree."""
        self.keys.discard(key)
        self.fetched.pop(key, None)
        self._over.pop(key, None)
        handoff_id = self.waits.pop(key, None)
        if handoff_id is not None:
            self.open[handoff_id].waiting.discard(key)

    def _cheapest(
        self,
        hints: Sequence[PrefixHint],
        token_ids: Ints,
        namespace: Namespace,
        token_s: float,
        queued_s: float,
    ) -> _FetchOption | None:
        """Return the cheapest fetch, or None if computing is cheaper or no paired node has much
        more of the prompt.
        """
        own = self._cache.match(token_ids, namespace).num_tokens
        options, much = [], False
        for hint in hints:
            end = self._end_of_fetch(min(hint.num_tokens, len(token_ids)), own)
            much = much or end > 0
            producer = self._shared.producers.get(hint.address)
            if end and producer is not None:
                options.append(self._option(producer, token_ids[:end], namespace, own))
        if not options:
            self.counts["prefix_fetches/unpaired"] += much
            return None
        best = max(options, key=lambda option: len(option.token_ids) * token_s - option.read_s)
        num_fresh = len(best.token_ids) - own
        if not self.costs.pays(best.read_s, num_fresh, token_s=token_s, queued_s=queued_s):
            self.counts["prefix_fetches/too_expensive"] += 1
            return None
        return best

    def _end_of_fetch(self, num_tokens: int, own: int) -> int:
        """Return the number of tokens in whole pages, or 0 if that is not much more than `own`."""
        page_size = self._tables.page_size
        end = num_tokens // page_size * page_size
        return end if end - own >= LEAST_PAGES * page_size else 0

    def _option(
        self, producer: ProducerUp, token_ids: Ints, namespace: Namespace, own: int, ticket: int = 0
    ) -> _FetchOption:
        num_pages = num_pages_of(self._tables.handed_over(len(token_ids), own))
        num_reads = sum(
            fetch.option.producer.instance == producer.instance for fetch in self.open.values()
        )
        num_bytes, now = num_pages * self._page_bytes, self._clock()
        read_s = self.costs.read_s(producer.instance, num_bytes, producer.gib_per_s, num_reads, now)
        return _FetchOption(producer, token_ids, namespace, own, read_s, ticket)

    def _wait(self, key: int, option: _FetchOption, room: int) -> bool:
        """Wait for a fetch of this prefix, in progress or new. Returns False if pages are short."""
        handoff_id = self._in_progress(option) or self._open(option, room)
        if handoff_id is None:
            self.counts["prefix_fetches/no_capacity"] += 1
            return False
        self.open[handoff_id].waiting.add(key)
        self.waits[key] = handoff_id
        self.keys.add(key)
        self._over.pop(key, None)  # of an earlier fetch
        return True

    def _in_progress(self, option: _FetchOption) -> HandoffId | None:
        for handoff_id, fetch in self.open.items():
            same = fetch.option.namespace == option.namespace
            if same and np.array_equal(fetch.option.token_ids, option.token_ids):
                return handoff_id
        return None

    def _open(self, option: _FetchOption, room: int) -> HandoffId | None:
        """Start a fetch. Returns None if pages are short."""
        num_pages = self._tables.room_pages(len(option.token_ids), option.prefix_tokens)
        if num_pages > room:
            return None
        opened = self._shared.open(
            option.producer,
            Prefix(option.token_ids.tobytes(), option.namespace, option.ticket),
            UNNAMED,  # the namespace includes the weight version
            self._fetch_s + TIMES_EXPECTED * option.read_s,
            num_pages,
            prefix_tokens=option.prefix_tokens,
        )
        if opened is None:
            return None
        handoff_id, fresh = opened
        self.pages_in_use[handoff_id] = fresh
        self.open[handoff_id] = _Fetch(option, fresh, self._clock())
        return handoff_id

    def held(self, event: CompletedEvent) -> None:
        """Insert the fetched tokens into the tree."""
        fetch = self._ended(event.id, "completed")
        option, tables, end = fetch.option, self._tables, event.num_tokens
        tokens, prefix = option.token_ids[:end], option.prefix_tokens
        here = self._cache.match(tokens, option.namespace).shared[:, : prefix // tables.page_size]
        if here.shape[1] * tables.page_size < prefix:
            return  # the prefix before them was evicted meanwhile
        num_pages = num_pages_of(tables.handed_over(end, prefix))
        holding = PageHolding.laid_out(tables, here, fetch.fresh[:num_pages], end)
        self._cache.insert(tokens, holding, option.namespace, state=holding.state)
        for key in fetch.waiting:
            self.fetched[key] = FetchedPrefix(end - prefix, option.producer.instance)

    def lost(self, event: FailedEvent) -> None:
        self._ended(event.id, "failed")

    def reads_ended(self, event: ReadsEndedEvent) -> None:
        self._pages.drop(self.pages_in_use.pop(event.id), PageHolder.READ)

    def _ended(self, handoff_id: HandoffId, outcome: str) -> _Fetch:
        fetch = self.open.pop(handoff_id)
        self.counts[f"prefix_fetches/{outcome}"] += 1
        producer, now = fetch.option.producer, self._clock()
        num_bytes = len(fetch.fresh) * self._page_bytes
        self.costs.learn(producer.instance, num_bytes, producer.gib_per_s, now - fetch.began, now)
        for key in fetch.waiting:
            del self.waits[key]
        self._over |= dict.fromkeys(fetch.waiting)
        return fetch
