"""Prefix sharing of a node: its exports and fetches, counts of where prompts' KV came from, and the
invalidation of corrupt prefixes.
"""

import math
import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Protocol

import numpy as np

from common.config import PrefixSharingConfig
from common.queueing import QueueEntry, QueueEstimator
from common.request import PrefixHint
from engine.batch.batch import Ints
from engine.batch.request import Request
from engine.core import EngineCore
from engine.kv_cache.radix import PrefixCache
from engine.scheduler.slot_owners import CorruptPrefix
from kvtransfer.messages import (
    Embeddings,
    HandoffId,
    InvalidatePrefix,
    Live,
    Prefix,
    Prompt,
    Weights,
)
from kvtransfer.ports import (
    ClosedEvent,
    CompletedEvent,
    ConsumerCommands,
    FailCommand,
    FailedEvent,
    GrantedEvent,
    InvalidateCommand,
    NodeEvent,
    OpenedEvent,
    ProducerDown,
    ProducerRate,
    ProducerUp,
    ReadsEndedEvent,
    TransferPort,
)
from node.sharing.exports import PrefixExports
from node.sharing.fetches import PrefixFetches
from node.sharing.reads import FIRST_PREFIX_NUMBER, FIRST_WEIGHTS_NUMBER, SharedReads

MAX_INVALIDATIONS = 32
INVALIDATION_INTERVAL_S = 1.0


class CorruptPrefixes:
    """Invalidation of corrupt KV (NaN or Inf logits) between nodes. Engine thread only.

    This node asks the node from which the KV came to drop it, and drops prefixes when asked.

    Each node drops prefixes that led to NaN or Inf in its own requests. A producer might not
    notice: it may compute from its own KV differently, or never compute from KV that it exports.
    Therefore a request records the nodes from which its KV was read.

    A node cannot verify such a report. It honours at most MAX_INVALIDATIONS at once, and then one
    per INVALIDATION_INTERVAL_S, from all nodes together. Each costs it one prefix of one namespace,
    which must be recomputed.

    Attributes:
        counts: number by cause, named as in EngineStats.
    """

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
        causes = ("own", "asked", "limited")
        self.counts = dict.fromkeys((f"forgotten_prefixes/{cause}" for cause in causes), 0)

    def found(self, prefix: CorruptPrefix) -> None:
        """Report corrupt KV, which this node has dropped, to the nodes from which it came."""
        self.counts["forgotten_prefixes/own"] += 1
        message = InvalidatePrefix(prefix.token_ids.tobytes(), prefix.namespace)
        for producer in dict.fromkeys(prefix.given_by):
            self._port.post(InvalidateCommand(producer, message))

    def asked(self, event: InvalidatePrefix) -> None:
        now = self._clock()
        due = max(self._next_due, now)
        if due > now + (MAX_INVALIDATIONS - 1) * INVALIDATION_INTERVAL_S:
            self.counts["forgotten_prefixes/limited"] += 1
            return
        self._next_due = due + INVALIDATION_INTERVAL_S
        self.counts["forgotten_prefixes/asked"] += 1
        self._cache.forget(np.frombuffer(event.token_ids, np.int32), event.namespace)


class PrefixSources:
    """Counts the tokens of computed prompts by the source of their KV: this node's cache, another
    node's, or computation. Also measures the time per computed token, to compare computation with a
    fetch. Engine thread only.

    Attributes:
        computing: admitted requests, by uncached tokens.
        counts: tokens by source, named as in EngineStats.
    """

    def __init__(self) -> None:
        self.computing = QueueEstimator()
        sources = ("own", "fetched", "computed")
        self.counts = dict.fromkeys((f"prompt_token_ways/{source}" for source in sources), 0)

    def admitted(self, request: Request, fetched_tokens: int, now: float) -> None:
        """Record an admitted request.

        Args:
            fetched_tokens: tokens fetched for it. Only tokens that are still cached count.
        """
        cached = request.cached_tokens
        fetched, computed = min(fetched_tokens, cached), len(request.token_ids) - cached
        self.counts["prompt_token_ways/own"] += cached - fetched
        self.counts["prompt_token_ways/fetched"] += fetched
        self.counts["prompt_token_ways/computed"] += computed
        self.computing.leave(request.key)
        self.computing.join(request.key, QueueEntry(-math.inf, computed), now)


class SharedReader(Protocol):
    """The reading end of hand-offs that serve no request. They are named by their ids.

    Attributes:
        pages_in_use: held until no bytes can land in them.
    """

    pages_in_use: dict[HandoffId, Ints]

    def held(self, event: CompletedEvent) -> None: ...

    def lost(self, event: FailedEvent) -> None: ...

    def reads_ended(self, event: ReadsEndedEvent) -> None: ...


class SharedExporter(Protocol):
    """The exporting end of such hand-offs. They are named by their serials.

    Attributes:
        pages_in_use: held for publication.
    """

    pages_in_use: dict[int, Ints]

    def granted(self, event: GrantedEvent) -> None: ...

    def closed(self, event: ClosedEvent) -> None: ...


class WeightReader(SharedReader, Protocol):
    def poll(self) -> None: ...


class WeightExporter(SharedExporter, Protocol):
    def opened(self, event: OpenedEvent, source: Weights) -> None: ...

    def poll(self) -> None: ...


class SharedWeights(Protocol):
    """The weights that nodes share. WeightSharing documents the members. Simulated nodes have none,
    and need no torch.
    """

    @property
    def exports(self) -> WeightExporter: ...

    @property
    def reads(self) -> WeightReader: ...

    @property
    def busy(self) -> bool: ...


class PrefixSharing:
    """The sharing of prefixes and weights of a node. Requests are named by their keys. Engine
    thread only.

    Args:
        weights: weight sharing, which uses the same pages, port and `shared`, or None.
    Attributes:
        shared: updated with the events that are handled.
    """

    def __init__(
        self,
        config: PrefixSharingConfig,
        shared: SharedReads,
        port: TransferPort,
        *,
        core: EngineCore,
        page_bytes: int,
        weights: SharedWeights | None,
    ) -> None:
        cache, pages, tables = core.cache, core.pages, core.shape.tables
        self.shared = shared
        self._port = port
        self._tiers = core.tiers
        self._weights = weights
        # Open hand-offs of this producer, by serial. None: refused.
        self._exporters: dict[int, SharedExporter | None] = {}
        self.exports = PrefixExports(
            enabled=config.enabled,
            cache=cache,
            pages=pages,
            tiers=core.tiers,
            tables=tables,
            port=port,
        )
        self.fetches = PrefixFetches(
            config,
            shared,
            page_bytes=page_bytes,
            cache=cache,
            pages=pages,
            tables=tables,
        )
        self.sources = PrefixSources()
        self.corrupt_prefixes = CorruptPrefixes(cache, port)

    @property
    def busy(self) -> bool:
        """Return whether another node reads here, or bytes may land or be copied here."""
        tiers = self._tiers is not None and self._tiers.busy
        weights = self._weights is not None and self._weights.busy
        return bool(tiers or weights or self._exporters or self.fetches.busy)

    def poll(self) -> None:
        """Finish loads from offload tiers and saves to them, and continue copies of weights. Called
        in each turn of the engine loop, before prepared requests are scheduled.
        """
        if self._tiers is not None:
            self._tiers.poll()
        if self._weights is not None:
            if self._weights.exports.pages_in_use:
                self._weights.exports.poll()
            if self._weights.reads.pages_in_use:
                self._weights.reads.poll()

    def exported(self) -> Iterator[Ints]:
        """Return the pages held for publication."""
        weights = {} if self._weights is None else self._weights.exports.pages_in_use
        return chain(self.exports.pages_in_use.values(), weights.values())

    def reads(self) -> Iterator[Ints]:
        """Return the pages held for reads."""
        weights = {} if self._weights is None else self._weights.reads.pages_in_use
        return chain(self.fetches.pages_in_use.values(), weights.values())

    def counters(self) -> dict[str, int]:
        own = {**self.sources.counts, **self.corrupt_prefixes.counts}
        return {**self.exports.counts, **self.fetches.counts, **own}

    def _num_below(self, request: Request) -> int:
        """Return the number of prompt tokens that offload tiers of this node have."""
        if self._tiers is None:
            return 0
        match = self._tiers.match(request.token_ids[:-1], request.namespace)
        return 0 if match is None else len(match.token_ids)

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
            token_s=self.sources.computing.unit_s,
            queued_s=queued_s,
        )

    def admitted(self, request: Request) -> None:
        fetched = self.fetches.fetched.get(request.key)
        if fetched is not None:
            request.given_by.append(fetched.producer)
        num_fetched = fetched.num_tokens if fetched else 0
        self.sources.admitted(request, num_fetched, time.monotonic())

    def forget(self, key: int) -> None:
        """Forget an ended request in any stage."""
        if key in self.fetches.keys:
            self.fetches.forget(key)
        self.sources.computing.leave(key)

    def handle(self, event: NodeEvent) -> bool:
        """Handle an event of the transfer thread about a producer, a prefix or weights. Returns
        False if other parts must handle it too.
        """
        match event:
            case OpenedEvent():
                return self._opened(event)
            case GrantedEvent(serial=serial) if serial in self._exporters:
                if (exporter := self._exporters[serial]) is not None:
                    exporter.granted(event)
                return True
            case ClosedEvent(serial=serial) if serial in self._exporters:
                if (exporter := self._exporters.pop(serial)) is not None:
                    exporter.closed(event)
                return True
            case CompletedEvent(id=id) | FailedEvent(id=id) | ReadsEndedEvent(id=id):
                return self._read(event, id.request)
            case ProducerUp() | ProducerRate():
                self.shared.note(event)
            case ProducerDown():
                self.fetches.costs.forget(event.instance)
                return not self.shared.note(event)
            case InvalidatePrefix():
                self.corrupt_prefixes.asked(event)
                return True
        return False

    def _opened(self, event: OpenedEvent) -> bool:
        match event.source:
            case Prompt() | Live():
                return False
            case Prefix() as prefix:
                self._exporters[event.serial] = self.exports
                self.exports.opened(event, prefix)
            case Weights() as pieces if self._weights is not None:
                self._exporters[event.serial] = self._weights.exports
                self._weights.exports.opened(event, pieces)
            case Embeddings() | Weights():
                self._exporters[event.serial] = None
                encodes = isinstance(event.source, Embeddings)
                reason = "this is not an encode node" if encodes else "this node shares no weights"
                self._port.post(FailCommand(event.serial, reason, retryable=False))
        return True

    def _read(self, event: CompletedEvent | FailedEvent | ReadsEndedEvent, number: int) -> bool:
        """Handle an event about the read with this number, if it is one of these."""
        reader: SharedReader
        if number >= FIRST_PREFIX_NUMBER:
            reader = self.fetches
        elif number >= FIRST_WEIGHTS_NUMBER and self._weights is not None:
            reader = self._weights.reads
        else:
            return False
        match event:
            case CompletedEvent():
                reader.held(event)
            case FailedEvent():
                reader.lost(event)
            case ReadsEndedEvent():
                reader.reads_ended(event)
        return True
