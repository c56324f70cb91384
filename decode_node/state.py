"""The record of a request on the decode node, with its hand-offs and reserved pages."""

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import msgspec
import numpy as np

from common.errors import EngineFault
from common.page_tables import PageTables, num_pages_of
from common.request import PrefixHint
from common.requests.logprobs import Logprobs
from common.requests.namespace import Namespace
from engine.batch.holding import PageHolding
from engine.batch.request import Request
from engine.kv_cache.pages import PageAllocator, PageHolder
from engine.kv_cache.radix import PrefixCache
from engine.offload.cache_tiers import CacheTiers
from engine.scheduler.scheduler import Scheduler
from kvtransfer.messages import HandoffId, SampledOutput
from kvtransfer.ports import Ints
from node.messages import Placement
from node.request_state import RequestStage, RequestState
from node.timings import HandoffTimings, RequestTimings


class PageReservation(NamedTuple):
    """Pages of all tokens of a request, held for it: those of the cached prefix, and fresh ones.

    The fresh pages have two holds. The request's hold follows the request. The hold for reads lasts
    until no more bytes can land in the pages, whatever happens to the request.

    Attributes:
        holding: the pages. For a migration, one table with all pages until its number of tokens is
            known.
        prefix_tokens: tokens in whole cached pages of full tables.
        fresh: the other pages, in the order of GrantCommand.
    """

    holding: PageHolding
    prefix_tokens: int
    fresh: Ints


class PageReservations:
    """Reserves pages for incoming hand-offs. Engine thread only.

    Attributes:
        reads: pages held until no more bytes can land in them.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        pages: PageAllocator,
        cache: PrefixCache,
        tables: PageTables,
        tiers: CacheTiers | None,
        page_bytes: int,
    ) -> None:
        self._scheduler = scheduler
        self._pages = pages
        self._cache = cache
        self._tiers = tiers
        self.tables = tables
        self.page_bytes = page_bytes
        self.reads: dict[HandoffId, Ints] = {}

    def reserve(
        self, handoff_id: HandoffId, token_ids: Ints, namespace: Namespace, room_tokens: int = 0
    ) -> PageReservation | None:
        """Reserve pages for all tokens, or none.

        Args:
            room_tokens: for a migration, the number of tokens that must fit. 0: not a migration.
        Returns:
            None if pages are short, which may happen although they seemed to suffice: a page that
                looks evictable may be the parent of a held one.
        """
        num_tokens = len(token_ids)
        cached = self._cache.match(token_ids, namespace).shared
        prefix_tokens = cached.shape[1] * self.tables.page_size
        if room_tokens:
            num_pages = self.tables.room_pages(room_tokens, prefix_tokens)
        else:
            num_pages = num_pages_of(self.tables.handed_over(num_tokens, prefix_tokens))
        self._pages.hold(cached.ravel(), PageHolder.REQUEST)
        fresh = self._scheduler.allocate(num_pages, PageHolder.REQUEST)
        if fresh is None:
            self._pages.drop(cached.ravel(), PageHolder.REQUEST)
            return None
        if self._tiers is not None:
            self._tiers.used(token_ids[:prefix_tokens], namespace)
        self._pages.hold(fresh, PageHolder.READ)
        self.reads[handoff_id] = fresh
        if room_tokens:
            holding = PageHolding.of(np.concatenate((cached.ravel(), fresh)))
        else:
            holding = PageHolding.laid_out(self.tables, cached, fresh, num_tokens)
        return PageReservation(holding, prefix_tokens, fresh)

    def lacks_pages(self, token_ids: Ints, destination: PageReservation) -> bool:
        """Return whether the reads will bring whole pages into the cache that it lacks now."""
        whole = len(token_ids) - len(token_ids) % self.tables.page_size
        return self._cache.enabled and destination.prefix_tokens < whole

    def settle(self, destination: PageReservation, num_tokens: int) -> PageReservation:
        """Adjust the reservation of a migration once its number of tokens with KV is known. Surplus
        pages become free as soon as no read can land in them.
        """
        tables, prefix = self.tables, destination.prefix_tokens
        cached = destination.holding.flat()[: -len(destination.fresh) or None]
        cached = cached.reshape(tables.num_full, tables.num_pages(prefix))
        num_pages = num_pages_of(tables.handed_over(num_tokens, prefix))
        fresh, surplus = np.split(destination.fresh, [num_pages])
        self._pages.drop(surplus, PageHolder.REQUEST)
        holding = PageHolding.laid_out(tables, cached, fresh, num_tokens)
        return PageReservation(holding, prefix, fresh)

    def drop(self, destination: PageReservation) -> None:
        """Release the request's hold on the pages. Reads may continue."""
        self._pages.drop(destination.holding.flat(), PageHolder.REQUEST)

    def reads_ended(self, handoff_id: HandoffId) -> None:
        self._pages.drop(self.reads.pop(handoff_id), PageHolder.READ)


# Steps of a request whose log-probabilities are kept for a node that continues it.
KEPT_LOGPROBS = 1024
# Rate assumed for the read of a migration if none is reported.
UNKNOWN_GIB_S = 1.0


class HandoffAttempt(msgspec.Struct, eq=False):
    """One attempt at a hand-off to this node.

    Attributes:
        producer: instance id of the producer.
        token_ids: tokens requested from the producer. The newest token of a running request may
            have no KV.
        num_pages: pages for these tokens and the next one.
        opened: time.monotonic().
        prompt: its namespace and tokens. Empty for migrations.
        room_tokens: for migrations, the maximum number of tokens with KV on arrival. 0: a prompt.
        until: deadline of the current wait of a migration, by time.monotonic().
        destination: reserved pages, from the grant on.
        growth_pages: pages to keep free for the request after it joins.
        output: sent to the client at once, or for a migration after the join.
        held: the KV has arrived and is correct. The request waits at most for a slot.
    """

    id: HandoffId
    producer: int
    token_ids: Ints
    num_pages: int
    opened: float
    stamps: HandoffTimings
    prompt: bytes = b""
    room_tokens: int = 0
    until: float = math.inf
    destination: PageReservation | None = None
    growth_pages: int = 0
    producer_cached_tokens: int = 0
    output: SampledOutput | None = None
    held: bool = False

    @property
    def migrates(self) -> bool:
        return self.room_tokens > 0

    @property
    def reserved(self) -> PageReservation:
        """Return the pages of a granted attempt. Raises EngineFault before the grant."""
        if self.destination is None:
            raise EngineFault(f"hand-off {tuple(self.id)} is not granted")
        return self.destination

    @property
    def cached_tokens(self) -> int:
        """Tokens of the request whose KV this node or the producer had cached."""
        return max(self.reserved.prefix_tokens, self.producer_cached_tokens)

    def extend(self, request: Request) -> None:
        """Append the first token to the request if it has arrived, for a migration together with
        the tokens that its source generated before. Idempotent.
        """
        if self.output is not None:
            fresh = np.array((*self.output.token_ids, self.output.token), np.int32)
            request.token_ids = np.concatenate((self.token_ids, fresh))


class MigrationStage(Enum):
    RUNNING = "running"
    STOPPING = "stopping"
    PAUSED = "paused"


_NEXT = {
    MigrationStage.RUNNING: {MigrationStage.STOPPING},
    MigrationStage.STOPPING: {MigrationStage.PAUSED},
    MigrationStage.PAUSED: set[MigrationStage](),
}


@dataclass(slots=True, eq=False)
class OutgoingMigration:
    """A hand-off of one running request to another node.

    Attributes:
        num_known: tokens that the consumer knows.
        prefix_tokens: tokens whose KV the consumer has.
        over: the request has ended, or the hand-off is cancelled or closed.
    """

    serial: int
    state: "DecodeState"
    num_known: int
    stage: MigrationStage = MigrationStage.RUNNING
    prefix_tokens: int = 0
    room_tokens: int = 0
    gib_per_s: float = UNKNOWN_GIB_S
    paused_until: float = math.inf
    exported: Ints = field(default_factory=lambda: np.empty(0, np.int32))
    over: bool = False

    def move(self, stage: MigrationStage) -> None:
        if stage not in _NEXT[self.stage]:
            raise EngineFault(f"a migration cannot go from {self.stage.name} to {stage.name}")
        self.stage = stage


@dataclass(slots=True, eq=False, kw_only=True)
class DecodeState(RequestState):
    """A request for which this node is responsible.

    Attributes:
        placement: where the router allows it to run.
        prefix_hints: nodes known to hold part of the prompt.
        candidates: producers that have not failed it, in order of preference.
        until: deadline of its wait for a producer, by time.monotonic().
        migration: its migration to another node.
        logprobs: log-probabilities of its last steps.
    """

    timings: RequestTimings
    placement: Placement
    prefix_hints: tuple[PrefixHint, ...] = ()
    candidates: tuple[str, ...] = ()
    next_attempt: int = 1
    until: float = math.inf
    handoff: HandoffAttempt | None = None
    migration: OutgoingMigration | None = None
    logprobs: deque[Logprobs] = field(default_factory=lambda: deque(maxlen=KEPT_LOGPROBS))

    @property
    def origin(self) -> tuple[int, int]:
        return self.request.origin

    @property
    def attempt(self) -> HandoffAttempt:
        """Return the attempt in progress. Raises EngineFault if the request has no hand-off."""
        if self.handoff is None:
            raise EngineFault(f"request {self.key} has no hand-off")
        return self.handoff

    # Read from the request, so that it keeps its position in queues after a lost hand-off.

    @property
    def arrived(self) -> float:
        return self.request.arrived

    @property
    def queue_position(self) -> float:
        return self.request.queue_position

    @property
    def priority(self) -> int:
        return self.request.spec.priority

    @property
    def client(self) -> int:
        return self.request.spec.client

    @property
    def client_weight(self) -> float:
        return self.request.spec.client_weight

    def describe(self, now: float) -> dict[str, object]:
        """Return the log fields of its hand-off: its queue, its request and its progress."""
        fields: dict[str, object] = {
            "queue": self.stage.value,
            "request_id": self.request.spec.request_id,
        }
        attempt = self.handoff
        if attempt is not None:
            fields |= {
                "id": tuple(attempt.id),
                "producer": attempt.stamps.prefill,
                "pages": attempt.num_pages,
                "open_s": now - attempt.opened,
            }
        if attempt is not None and self.stage is RequestStage.TRANSFER:
            fields |= {"first_token": attempt.output is not None, "held": attempt.held}
        return fields
