"""Prefix sharing of a node: its exports and fetches, counts of where prompts' KV came from, and the
invalidation of corrupt prefixes.
"""

import math
import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Protocol

from common.config import PrefixSharingConfig
from common.page_tables import PageTables
from common.queueing import QueueEntry, QueueEstimator
from common.request import PrefixHint
from engine.batch.batch import Ints
from engine.batch.request import Request
from engine.kv_cache.pages import PageAllocator
from engine.kv_cache.radix import PrefixCache
from engine.offload.cache_tiers import CacheTiers
from engine.scheduler.residents import CorruptPrefix
from kvtransfer.messages import Embeddings, Live, Prefix, Prompt
from kvtransfer.ports import (
    ClosedEvent,
    CompletedEvent,
    ConsumerCommands,
    FailCommand,
    FailedEvent,
    GrantedEvent,
    InvalidateCommand,
    InvalidateEvent,
    NodeEvent,
    OpenedEvent,
    ProducerDown,
    ProducerRate,
    ProducerUp,
    ReadsEndedEvent,
    TransferPort,
)
from node.sharing.exports import FIRST_SHARED_NUMBER, PrefixExports, take
from node.sharing.fetches import PrefixFetches

MAX_INVALIDATIONS = 32
INVALIDATION_INTERVAL_S = 1.0


# Invalidation of corrupt KV (NaN or Inf logits) between nodes. This node asks the node from which
# the KV came to drop it, and drops prefixes when asked.
#
# Each node drops prefixes that led to NaN or Inf in its own requests. A producer might not notice:
# it may compute from its own KV differently, or never compute from KV that it exports. Therefore a
# request records the nodes from which its KV was read.
#
# A node cannot verify such a report. It honours at most MAX_INVALIDATIONS at once, and then one per
# INVALIDATION_INTERVAL_S, from all nodes together. Each costs it one prefix of one namespace, which
# must be recomputed.
class CorruptPrefixes:
    """Sends and handles invalidations of corrupt prefixes. Engine thread only."""

    def __init__(
        self,
        cache: PrefixCache,
        port: ConsumerCommands,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._port = port
        self._clock = clock
        self._next_due = 0.0  # earliest time of the next one, if they came in equal intervals
        self._counts = dict.fromkeys(("own", "asked", "limited"), 0)

    def counters(self) -> dict[str, int]:
        return {f"forgotten_prefixes/{cause}": number for cause, number in self._counts.items()}

    def found(self, prefix: CorruptPrefix) -> None:
        """Report corrupt KV, which this node has dropped, to the nodes from which it came."""
        self._counts["own"] += 1
        for producer in dict.fromkeys(prefix.given_by):
            self._port.post(InvalidateCommand(producer, prefix.token_ids, prefix.namespace))

    def asked(self, event: InvalidateEvent) -> None:
        now = self._clock()
        due = max(self._next_due, now)
        if due > now + (MAX_INVALIDATIONS - 1) * INVALIDATION_INTERVAL_S:
            self._counts["limited"] += 1
            return
        self._next_due = due + INVALIDATION_INTERVAL_S
        self._counts["asked"] += 1
        self._cache.forget(event.token_ids, event.namespace)


# Counts where the KV of computed prompts came from: this node's cache, another node's, or
# computation. Also measures the time per computed token.
class PrefixSources:
    """Counters by source. Engine thread only."""

    def __init__(self) -> None:
        self._computing = QueueEstimator()  # admitted requests, by uncached tokens
        self._tokens = dict.fromkeys(("own", "fetched", "computed"), 0)

    @property
    def token_s(self) -> float:
        """Seconds per computed token. 0.0: unknown."""
        return self._computing.unit_s

    def counters(self) -> dict[str, int]:
        return {f"prompt_token_ways/{way}": number for way, number in self._tokens.items()}

    def admitted(self, request: Request, fetched_tokens: int, now: float) -> None:
        """Record an admitted request.

        Args:
            fetched_tokens: tokens fetched for it. Only tokens that are still cached count.
        """
        cached = request.cached_tokens
        fetched, computed = min(fetched_tokens, cached), len(request.token_ids) - cached
        self._tokens["own"] += cached - fetched
        self._tokens["fetched"] += fetched
        self._tokens["computed"] += computed
        self._computing.leave(request.key)
        self._computing.join(request.key, QueueEntry(-math.inf, computed), now)

    def computed(self, key: int, num_left: int) -> None:
        """Record a finished chunk of a request, of which num_left tokens remain."""
        self._computing.serve(key, num_left)

    def tick(self, now: float) -> None:
        """Update the time per token with the tokens computed since the last call."""
        self._computing.tick(now)

    def ended(self, key: int) -> None:
        """Remove an ended request. No effect if it was never admitted."""
        self._computing.leave(key)


class SharedWeights(Protocol):
    """The weights that nodes share. WeightSharing documents the members."""

    @property
    def port(self) -> TransferPort: ...

    @property
    def busy(self) -> bool: ...

    def take(self, event: NodeEvent) -> bool: ...

    def exported(self) -> Iterator[Ints]: ...

    def reads(self) -> Iterator[Ints]: ...


class PrefixSharing:
    """The prefix sharing of a node. Requests are named by their keys. Engine thread only.

    Args:
        weights: weight sharing, which uses the same pages and port.
    """

    def __init__(
        self,
        config: PrefixSharingConfig,
        *,
        instance: int,
        page_bytes: int,
        cache: PrefixCache,
        pages: PageAllocator,
        tiers: CacheTiers | None,
        tables: PageTables,
        weights: SharedWeights,
    ) -> None:
        self._tiers = tiers
        self._weights = weights
        self._serials: set[int] = set()  # serials of hand-offs of weights, prefixes and embeddings
        port = weights.port
        self.exports = PrefixExports(
            enabled=config.enabled,
            cache=cache,
            pages=pages,
            tiers=tiers,
            tables=tables,
            port=port,
        )
        self.fetches = PrefixFetches(
            config,
            instance=instance,
            page_bytes=page_bytes,
            cache=cache,
            pages=pages,
            tables=tables,
            port=port,
        )
        self.ways = PrefixSources()
        self.corrupt_prefixes = CorruptPrefixes(cache, port)

    @property
    def busy(self) -> bool:
        """Return whether another node reads here, or bytes may land or be copied here."""
        reads = self.fetches.busy or self._weights.busy
        return bool(reads or len(self.exports) or (self._tiers is not None and self._tiers.busy))

    def poll(self) -> None:
        """Finish loads from offload tiers and saves to them. Called in each turn of the engine
        loop, before prepared requests are scheduled.
        """
        if self._tiers is not None:
            self._tiers.poll()

    def exported(self) -> Iterator[Ints]:
        """Return the pages held for publication."""
        return chain(self.exports.exported(), self._weights.exported())

    def reads(self) -> Iterator[Ints]:
        """Return the pages held for reads."""
        return chain(self.fetches.reads(), self._weights.reads())

    def counters(self) -> dict[str, int]:
        parts = self.exports, self.fetches, self.ways, self.corrupt_prefixes
        return {name: number for part in parts for name, number in part.counters().items()}

    def _num_below(self, request: Request) -> int:
        """Return the number of prompt tokens that offload tiers of this node have."""
        if self._tiers is None:
            return 0
        way = self._tiers.way(request.token_ids[:-1], request.namespace)
        return 0 if way is None else len(way.token_ids)

    def fetch(
        self, request: Request, hints: tuple[PrefixHint, ...], *, room: int, queued_s: float
    ) -> bool:
        """Start to fetch another node's part of the prompt, if that is worth it and no offload tier
        of this node has as much. Returns True if the scheduler must wait until `fetches.take_over`
        returns the key.

        Args:
            room: pages that may be used now.
            queued_s: seconds until it would be scheduled.
        """
        if not hints or len(request.reusable_tokens) < len(request.token_ids) - 1:
            return False
        below = self._num_below(request)
        return self.fetches.start(
            request.key,
            request.token_ids,
            request.namespace,
            tuple(hint for hint in hints if hint.num_tokens > below),
            room=room,
            token_s=self.ways.token_s,
            queued_s=queued_s,
        )

    def admitted(self, request: Request) -> None:
        """Record an admitted request and the source of its prefix."""
        fetched = self.fetches.fetched(request.key)
        if fetched.num_tokens:
            request.given_by.append(fetched.producer)
        self.ways.admitted(request, fetched.num_tokens, time.monotonic())

    def forget(self, key: int) -> None:
        """Forget an ended request in any stage."""
        self.fetches.forget(key)
        self.ways.ended(key)

    def take(self, event: NodeEvent) -> bool:
        """Handle an event of the transfer thread about a prefix. Returns False if other parts must
        handle it too.
        """
        match event:
            case OpenedEvent(serial=serial, source=source):
                if isinstance(source, Prompt | Live):
                    return False
                self._serials.add(serial)
                if isinstance(source, Embeddings):
                    reason = "this is not an encode node"
                    self._weights.port.post(FailCommand(serial, reason, retryable=False))
                else:
                    self._pass_on(event)
                return True
            case GrantedEvent(serial=serial) | ClosedEvent(serial=serial):
                if serial not in self._serials:
                    return False
                if isinstance(event, ClosedEvent):
                    self._serials.remove(serial)
                self._pass_on(event)
                return True
            case CompletedEvent(id=id) | FailedEvent(id=id) | ReadsEndedEvent(id=id):
                return id.request >= FIRST_SHARED_NUMBER and self._pass_on(event)
            case ProducerUp() | ProducerDown():
                return self._pass_on(event)
            case ProducerRate():
                self.fetches.producer_rate(event)
            case InvalidateEvent():
                self.corrupt_prefixes.asked(event)
                return True
        return False

    def _pass_on(self, event: NodeEvent) -> bool:
        return self._weights.take(event) or take(event, Prefix, self.fetches, self.exports)
