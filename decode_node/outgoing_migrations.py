"""Live migration of running requests to another decode node. This node is the producer.

    RUNNING --granted--> STOPPING --no launched step has it--> PAUSED --completed--> gone
       ^                     |                                    |
       `-----------------------not completed --------------------/

Exactly one node runs a request. The transfer thread decides which: after a completed hand-off the
request has left, after any other one it resumes here. A deadline in this module only requests that
decision. A request has at most one hand-off, whose end alone resumes it.
"""

import logging
import math
import time
from functools import partial

import numpy as np

from common.logs import ThrottledLog
from common.page_tables import PageTables
from decode_node.active_requests import ActiveRequests
from decode_node.state import DecodeState, MigrationStage, OutgoingMigration
from engine.batch.request import Ints, moved
from engine.kv_cache.pages import PageAllocator, PageHolder
from engine.scheduler.scheduler import Scheduler
from kvtransfer.messages import Live, Prompt, SampledOutput
from kvtransfer.ports import (
    ClosedEvent,
    FailCommand,
    GrantedEvent,
    OpenedEvent,
    ProducerCommands,
    PublishCommand,
)
from node.request_state import Claim, RequestStage

log = logging.getLogger(__name__)

PAUSE_S = 1.0  # longest pause, in addition to the time for the read
# The time for a read assumes a tenth of the link's rate, which the consumer reports. Lower rates
# count as _SLOWEST_GIB_S.
_GIB = 1 << 30
_SLOWEST_GIB_S = 0.1
_SHARE = 0.1
# Time after the last migration in which the consumer can read the final reply before streams end.
LINGER_S = 1.0


class OutgoingMigrations:
    """The outgoing migrations. Engine thread only.

    Attributes:
        in_progress: migrations by serial.
        lingers_until: time until which a consumer may still wait for the final reply.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        pages: PageAllocator,
        tables: PageTables,
        page_bytes: int,
        port: ProducerCommands,
        active: ActiveRequests,
    ) -> None:
        self._scheduler = scheduler
        self._pages = pages
        self._tables = tables
        self._page_bytes = page_bytes
        self._port = port
        self._active = active
        self.in_progress: dict[int, OutgoingMigration] = {}
        self._refused: set[int] = set()  # serials of refused hand-offs, until they are closed
        self.lingers_until = -math.inf
        self._log = ThrottledLog(log)

    # Events of the transfer thread

    def opened(self, event: OpenedEvent) -> None:
        """Accept or refuse a hand-off. Until the grant, the request runs and no pages are held."""
        source = event.source
        state = self._active.by_ticket(source.ticket) if isinstance(source, Live) else None
        refusal = self._refusal(state, event)
        if state is None or refusal:
            self._refused.add(event.serial)
            # A prompt is retried elsewhere: its sender assumed a prefill node at this address.
            retryable = isinstance(source, Prompt)
            self._port.post(FailCommand(event.serial, refusal, retryable))
            return
        migration = OutgoingMigration(event.serial, state, source.num_tokens)
        self.in_progress[event.serial] = state.migration = migration
        state.claims.add(Claim.MIGRATION, partial(self._cancel, migration, "the request has ended"))

    def _refusal(self, state: DecodeState | None, event: OpenedEvent) -> str:
        """Return why the request may not migrate, or "" if it may."""
        if not isinstance(event.source, Live):
            return "a decode node does not compute prompts for other nodes"
        if state is None:
            return "no request on this node has this ticket"
        if state.migration is not None:
            return "the request is already being migrated"
        request = state.request
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
        migration = self.in_progress.get(event.serial)
        if migration is None or migration.over:
            return  # refused or cancelled, and ClosedEvent will follow
        migration.prefix_tokens, migration.room_tokens = event.prefix_tokens, event.room_tokens
        if event.gib_per_s:
            migration.gib_per_s = max(event.gib_per_s, _SLOWEST_GIB_S)
        state = migration.state
        if not self._scheduler.pause(state.request):
            self._cancel(migration, "the request is not running")
            return
        migration.move(MigrationStage.STOPPING)
        state.move(RequestStage.MIGRATING, state.queue)

    def closed(self, event: ClosedEvent) -> None:
        if event.serial in self._refused:
            self._refused.remove(event.serial)
            return
        migration = self.in_progress.pop(event.serial)
        state, request = migration.state, migration.state.request
        migration.over, state.migration = True, None
        state.claims.release(Claim.MIGRATION)
        self._pages.drop(migration.exported, PageHolder.PUBLICATION)
        self._active.counters.count("moves/away" if event.completed else "moves/refused")
        if event.completed:
            self.lingers_until = time.monotonic() + LINGER_S
        else:
            self._log.info(
                "migration failed", request_id=request.spec.request_id, reason=event.reason
            )
        if migration.stage is MigrationStage.RUNNING or request.slot is None:
            return  # it never stopped, or has ended meanwhile
        if event.completed:
            self._scheduler.remove_migrated(request)
            state.close(moved())
        else:
            self._scheduler.resume(request)
            state.move(RequestStage.SCHEDULED, state.queue)

    def copied(self, ticket: int) -> bool:
        """Publish the whole pages of a running request in the prefix tree, so that the other node
        can copy them before the migration. Returns whether the request runs here. It keeps running.
        """
        state = self._active.by_ticket(ticket)
        return state is not None and self._scheduler.publish_prefix(state.request)

    def poll(self, now: float) -> None:
        """Publish requests that have stopped, and fail hand-offs whose pause is too long."""
        for migration in tuple(self.in_progress.values()):
            if migration.over:
                continue
            if migration.stage is MigrationStage.STOPPING:
                self._publish(migration, now)
            elif migration.stage is MigrationStage.PAUSED and migration.paused_until <= now:
                self._cancel(migration, "the consumer took too long")

    def cancel_all(self, reason: str) -> None:
        """Cancel all hand-offs. Stopped requests resume here."""
        for migration in tuple(self.in_progress.values()):
            self._cancel(migration, reason)

    def _publish(self, migration: OutgoingMigration, now: float) -> None:
        stopped = self._scheduler.take_paused(migration.state.request)
        if stopped is None:
            return
        tokens, num_kv = stopped.token_ids, len(stopped.token_ids) - 1
        num_fresh = num_kv - migration.num_known
        logprobs = None
        if migration.state.request.sampling.logprobs >= 0 and num_fresh:
            logprobs = self._active.sent_logprobs(migration.state, num_fresh)
            if logprobs is None:
                self._cancel(migration, "its log-probabilities are no longer stored")
                return
        if num_kv > migration.room_tokens:
            self._cancel(migration, f"{num_kv} tokens of KV exceed the pages reserved for it")
            return
        prefix = migration.prefix_tokens
        exported = stopped.holding.pages_of(self._tables.handed_over(num_kv, prefix))
        self._pages.hold(exported, PageHolder.PUBLICATION)
        migration.exported = exported
        read_s = len(exported) * self._page_bytes / (_SHARE * migration.gib_per_s * _GIB)
        migration.paused_until = now + PAUSE_S + read_s
        migration.move(MigrationStage.PAUSED)
        fresh = tuple(tokens[migration.num_known : -1].tolist())
        output = SampledOutput(int(tokens[-1]), fresh, logprobs=logprobs)
        self._port.post(
            PublishCommand(migration.serial, prefix, num_kv, exported, last=True, output=output)
        )

    def _cancel(self, migration: OutgoingMigration, reason: str) -> None:
        """Fail a hand-off once. The following ClosedEvent decides whether the request resumes."""
        if migration.over:
            return
        migration.over = True
        self._port.post(FailCommand(migration.serial, reason, retryable=False))


def _begins_with(tokens: Ints, token_ids: bytes) -> bool:
    """Return whether `tokens` start with `token_ids` (little-endian int32) and are longer."""
    known = np.frombuffer(token_ids, np.int32)
    return len(known) < len(tokens) and np.array_equal(tokens[: len(known)], known)
