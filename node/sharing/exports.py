"""Exports of cached prefixes to other nodes.

    Opened --Granted: what the tree has is held--> exported --ClosedEvent--> gone
      | ^   `--nothing, or too much is exported--> refused -^
      `-' an offload tier has more: it is loaded first

A producer uses only its own memory. It neither computes nor fetches for a consumer, so it never
waits for a node that waits for it. It holds no pages before the consumer has its own. Exported
pages stay in the tree. The tree may evict them, but they are freed only when the consumer is done.

A running request that is to migrate is inserted into the tree when a consumer requests it. Its
pages are needed until it has migrated, so they are exported without a limit.
"""

from collections.abc import Callable

import numpy as np

from common.page_tables import PageTables
from common.requests.namespace import Namespace
from engine.batch.batch import Ints
from engine.batch.holding import PageHolding
from engine.kv_cache.pages import PageAllocator, PageHolder
from engine.kv_cache.radix import PrefixCache
from engine.offload.cache_tiers import CacheTiers
from kvtransfer.messages import Prefix
from kvtransfer.ports import (
    ClosedEvent,
    FailCommand,
    GrantedEvent,
    OpenedEvent,
    ProducerCommands,
    PublishCommand,
)

SHARE = 8  # at most 1/SHARE of the pool is exported at once
MAX_ASKED = 256  # opened and not granted. Further ones are rejected
_NONE = np.empty(0, np.int32)


class PrefixExports:
    """Exports of cached prefixes. Engine thread only.

    Args:
        enabled: False: all consumers are rejected.
    Attributes:
        pages_in_use: held for publication, by serial. Empty for rejected ones.
        counts: results, named as in EngineStats.
    """

    def __init__(
        self,
        *,
        enabled: bool,
        cache: PrefixCache,
        pages: PageAllocator,
        tiers: CacheTiers | None,
        tables: PageTables,
        port: ProducerCommands,
    ) -> None:
        self._enabled = enabled
        self._cache = cache
        self._tiers = tiers
        self._pages = pages
        self._tables = tables
        self._port = port
        self._asked: dict[int, Prefix] = {}  # by serial, until they are granted
        self.pages_in_use: dict[int, Ints] = {}
        # By serial: exported pages that nothing else on this node needs.
        self._at_a_loss: dict[int, int] = {}
        self.counts = dict.fromkeys(
            (f"prefix_loans/{outcome}" for outcome in ("completed", "failed", "refused")), 0
        )
        self._learn: Callable[[int], bool] = lambda ticket: False

    def learn_by(self, learn: Callable[[int], bool]) -> None:
        """Set a function that is called with the ticket of a request to copy. If the request runs
        here, the function inserts its KV into the tree and returns True.
        """
        self._learn = learn

    def opened(self, event: OpenedEvent, source: Prefix) -> None:
        if len(self._asked) >= MAX_ASKED:
            self._refuse(event.serial, "busy: too many nodes are fetching prefixes")
        else:
            self._asked[event.serial] = source

    def granted(self, event: GrantedEvent) -> None:
        asked = self._asked.pop(event.serial, None)
        if asked is None:
            return  # rejected or closed
        if not self._enabled:
            return self._refuse(event.serial, "this node does not export")
        self.pages_in_use[event.serial] = _NONE  # until the producer has responded
        runs = bool(asked.ticket) and self._learn(asked.ticket)
        room = self._pages.num_pages // SHARE

        def answer() -> None:
            if event.serial in self.pages_in_use:  # false if it was closed meanwhile
                self._answer(event, tokens, asked.namespace, runs=runs)

        tokens = np.frombuffer(asked.token_ids, np.int32)
        tiers = self._tiers
        if tiers is None or not tiers.load(tokens, asked.namespace, room, answer):
            answer()

    def _answer(
        self, granted: GrantedEvent, tokens: Ints, namespace: Namespace, *, runs: bool
    ) -> None:
        serial, prefix = granted.serial, granted.prefix_tokens
        match = self._cache.match(tokens, namespace)
        end = match.num_tokens
        if end <= prefix:
            return self._refuse(serial, f"only {end} tokens of the prefix are cached here")
        holding = PageHolding(match.holding.tables, match.state)
        exported = holding.pages_of(self._tables.handed_over(end, prefix))
        if not runs:
            if sum(self._at_a_loss.values()) + len(exported) > self._pages.num_pages // SHARE:
                return self._refuse(serial, "busy: too many pages are exported already")
            self._at_a_loss[serial] = len(exported)
        if self._tiers is not None:
            self._tiers.used(tokens[:end], namespace)
        self._pages.hold(exported, PageHolder.PUBLICATION)
        self.pages_in_use[serial] = exported
        self._port.post(PublishCommand(serial, prefix, end, exported, last=True))

    def closed(self, event: ClosedEvent) -> None:
        self._asked.pop(event.serial, None)
        exported = self.pages_in_use.pop(event.serial, _NONE)
        self._pages.drop(exported, PageHolder.PUBLICATION)
        self._at_a_loss.pop(event.serial, None)
        if event.completed or len(exported):
            self.counts[f"prefix_loans/{'completed' if event.completed else 'failed'}"] += 1

    def _refuse(self, serial: int, reason: str) -> None:
        self.counts["prefix_loans/refused"] += 1
        self.pages_in_use[serial] = _NONE  # until it is closed
        self._port.post(FailCommand(serial, reason, retryable=False))
