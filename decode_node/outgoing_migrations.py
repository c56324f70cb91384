"""Running requests that migrate to another decode node. This node is the producer.

    RUNNING --granted--> STOPPING --no launched step has it--> PAUSED --dropped, held--> gone
       ^                     |                                    |
       `-----------------------dropped, not held ----------------/

Exactly one node runs a request: the one to which it was released as held. A paused request resumes
only after a ClosedEvent with "not held" and leaves only after one with "held". The transfer
thread decides this. A deadline here only requests the decision. A request has at most one hand-off,
and only the drop of that one resumes it.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from common.errors import EngineFault
from common.logs.throttle import Throttle, ThrottledLog
from common.page_tables import PageTables
from decode_node.active_requests import ActiveRequests
from decode_node.counts import DecodeCounters
from engine.batch.request import Ints, Request
from engine.kv_cache.pages import PageAllocator, PageHolder
from engine.scheduler.scheduler import Scheduler
from kvtransfer.messages import Live, Prompt
from kvtransfer.ports import (
    ClosedEvent,
    FailCommand,
    GrantedEvent,
    OpenedEvent,
    ProducerCommands,
    PublishCommand,
)

log = logging.getLogger(__name__)

PAUSE_S = 1.0  # longest pause, without the time for the bytes to be read
# The time for a read assumes a tenth of the link's rate, which the consumer reports. Rates below
# _SLOWEST_GIB_S count as that. _UNKNOWN_GIB_S is assumed if none is reported.
_GIB = 1 << 30
_SLOWEST_GIB_S = 0.1
_UNKNOWN_GIB_S = 1.0
_SHARE = 0.1
# After the last migration, the consumer has this long to read the final reply before streams end.
LINGER_S = 1.0


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
class _Departure:
    """A hand-off of one running request."""

    serial: int
    request: Request
    num_known: int  # tokens that the consumer knows
    state: MigrationStage = MigrationStage.RUNNING
    prefix_tokens: int = 0  # tokens that the consumer has KV of
    room_tokens: int = 0
    gib_per_s: float = _UNKNOWN_GIB_S
    paused_until: float = math.inf
    lent: Ints = field(default_factory=lambda: np.empty(0, np.int32))
    over: bool = False  # the request has ended, or the hand-off is cancelled

    def to(self, new: MigrationStage) -> None:
        if new not in _NEXT[self.state]:
            raise EngineFault(f"a departure cannot go from {self.state.name} to {new.name}")
        self.state = new


class OutgoingMigrations:
    """Outgoing migrations. Engine thread only.

    Args:
        on_moved: called with a request that runs elsewhere from now on. It is still in the
            scheduler, stopped.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        pages: PageAllocator,
        tables: PageTables,
        page_bytes: int,
        port: ProducerCommands,
        live: ActiveRequests,
        counts: DecodeCounters,
        on_moved: Callable[[Request], None],
    ) -> None:
        self._scheduler = scheduler
        self._pages = pages
        self._tables = tables
        self._page_bytes = page_bytes
        self._port = port
        self._live = live
        self._counts = counts
        self._on_moved = on_moved
        self._by_serial: dict[int, _Departure] = {}
        self._by_request: dict[int, _Departure] = {}  # by key; without those that are over
        self._refused: set[int] = set()  # serials, until they are dropped
        self._moved_at = -math.inf
        self._log = ThrottledLog(log, Throttle())

    def __len__(self) -> int:
        return len(self._by_serial)

    @property
    def busy(self) -> bool:
        """True if a consumer is still reading or waiting for a reply."""
        return bool(self._by_serial) or time.monotonic() < self._moved_at + LINGER_S

    def lent(self) -> Iterator[Ints]:
        """Yield the pages held for publication."""
        return (departure.lent for departure in self._by_serial.values())

    # Events of the transfer thread ----------------------------------------------------------------

    def opened(self, event: OpenedEvent) -> None:
        """Accept or refuse a hand-off.

        The request runs on, and no pages are held, until the grant.
        """
        source = event.source
        request = self._live.by_ticket(source.ticket) if isinstance(source, Live) else None
        refusal = self._refusal(request, event)
        if request is None or refusal:
            self._refused.add(event.serial)
            # A prompt is retried elsewhere: the sender found a prefill node at this address before.
            retryable = isinstance(source, Prompt)
            self._port.post(FailCommand(event.serial, refusal, retryable))
            return
        departure = _Departure(event.serial, request, source.num_tokens)
        self._by_serial[event.serial] = self._by_request[request.key] = departure

    def _refusal(self, request: Request | None, event: OpenedEvent) -> str:
        """Return why the request may not migrate, or "" if it may."""
        if not isinstance(event.source, Live):
            return "a decode node computes no prompts for others"
        if request is None:
            return "no request here has that ticket"
        if request.key in self._by_request:
            return "the request is about to leave already"
        tokens = self._scheduler.tokens_of(request)
        if tokens is None:
            return "the request is not running"
        asked = event.source.spec
        if asked.adapter != request.spec.adapter:
            return "the request has another adapter"
        if asked.namespace != request.spec.namespace:
            return "the request has another namespace"
        if event.weights != request.weights:
            return "the request has other weights"
        if not _begins_with(tokens, asked.token_ids):
            return "the request has other tokens"
        return ""

    def granted(self, event: GrantedEvent) -> None:
        departure = self._by_serial.get(event.serial)
        if departure is None or departure.over:
            return  # refused or cancelled; ClosedEvent will follow
        departure.prefix_tokens, departure.room_tokens = event.prefix_tokens, event.room_tokens
        if event.gib_per_s:
            departure.gib_per_s = max(event.gib_per_s, _SLOWEST_GIB_S)
        if not self._scheduler.pause(departure.request):
            self._give_up(departure, "the request is not running")
            return
        departure.to(MigrationStage.STOPPING)

    def dropped(self, event: ClosedEvent) -> None:
        if event.serial in self._refused:
            self._refused.remove(event.serial)
            return
        departure = self._by_serial.pop(event.serial)
        self._by_request.pop(departure.request.key, None)
        self._pages.drop(departure.lent, PageHolder.PUBLICATION)
        request = departure.request
        self._counts.moved_away(held=event.held)
        if event.held:
            self._moved_at = time.monotonic()
        else:
            self._log.info(
                "migration failed", request_id=request.spec.request_id, reason=event.reason
            )
        if departure.state is MigrationStage.RUNNING or request.slot is None:
            return  # it never stopped, or has ended meanwhile
        if event.held:
            self._on_moved(request)
        else:
            self._scheduler.resume(request)

    def copied(self, ticket: int) -> bool:
        """Publish the whole pages of a running request in the prefix tree, for a copy.

        Called before the migration is requested. The request keeps running. Returns whether it
        runs.
        """
        request = self._live.by_ticket(ticket)
        return request is not None and self._scheduler.publish_prefix(request)

    # Poll and end ---------------------------------------------------------------------------------

    def poll(self, now: float) -> None:
        """Publish requests that have stopped, and fail hand-offs whose pause is too long."""
        for departure in tuple(self._by_request.values()):
            if departure.over:
                continue
            if departure.state is MigrationStage.STOPPING:
                self._publish(departure, now)
            elif departure.state is MigrationStage.PAUSED and departure.paused_until <= now:
                self._give_up(departure, "the reader took too long")

    def ended(self, request: Request) -> None:
        """Cancel the hand-off of a request that has ended here and for its client."""
        departure = self._by_request.get(request.key)
        if departure is not None and not departure.over:
            self._give_up(departure, "the request has ended")

    def give_up_all(self, reason: str) -> None:
        """Cancel all hand-offs. Requests that have stopped resume here."""
        for departure in tuple(self._by_request.values()):
            if not departure.over:
                self._give_up(departure, reason)

    def _publish(self, departure: _Departure, now: float) -> None:
        stopped = self._scheduler.take_paused(departure.request)
        if stopped is None:
            return
        tokens, num_kv = stopped.token_ids, len(stopped.token_ids) - 1
        num_fresh = num_kv - departure.num_known
        logprobs = None
        if departure.request.sampling.logprobs >= 0 and num_fresh:
            logprobs = self._live.sent_logprobs(departure.request, num_fresh)
            if logprobs is None:
                self._give_up(departure, "its log-probabilities are not known any more")
                return
        if num_kv > departure.room_tokens:
            self._give_up(departure, f"{num_kv} tokens do not fit")
            return
        prefix = departure.prefix_tokens
        lent = stopped.holding.take(self._tables.handed_over(num_kv, prefix))
        self._pages.hold(lent, PageHolder.PUBLICATION)
        departure.lent = lent
        read_s = len(lent) * self._page_bytes / (_SHARE * departure.gib_per_s * _GIB)
        departure.paused_until = now + PAUSE_S + read_s
        departure.to(MigrationStage.PAUSED)
        self._port.post(
            PublishCommand(
                departure.serial,
                prefix,
                num_kv,
                lent,
                last=True,
                first_token=int(tokens[-1]),
                logprobs=logprobs,
                token_ids=tuple(tokens[departure.num_known : -1].tolist()),
            )
        )

    def _give_up(self, departure: _Departure, reason: str) -> None:
        """Fail the hand-off.

        ClosedEvent follows and decides whether the request resumes here.
        """
        departure.over = True
        self._port.post(FailCommand(departure.serial, reason, retryable=False))


def _begins_with(tokens: Ints, token_ids: bytes) -> bool:
    """Return whether `tokens` begin with all of `token_ids`, little-endian int32, and have more."""
    known = np.frombuffer(token_ids, np.int32)
    return len(known) < len(tokens) and np.array_equal(tokens[: len(known)], known)
