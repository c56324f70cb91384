"""Both ends of sharing prefixes at one node: what it lends, and what it fetches for prompts that it
is to compute."""

import time
from collections.abc import Iterator
from itertools import chain

from common.config import SharingConfig
from common.page_tables import PageTables
from common.requests.prefix_hint import PrefixAt
from engine.batch.batch import Ints
from engine.batch.request import Request
from engine.kv_cache.pages import PageAllocator
from engine.kv_cache.radix import RadixCache
from engine.offload.tiers import Tiers
from kvtransfer.messages import Prefix
from kvtransfer.ports import AskedToForget, NodeEvent, NodePort, OwnerRate
from node.sharing.corrupt_prefixes import SpoiltPrefixes
from node.sharing.ends import take
from node.sharing.exports import Loans
from node.sharing.fetches import Fetches
from node.sharing.prefix_sources import Ways
from node.sharing.weights import WeightSharing


class PrefixSharing:
    """Engine thread only. Prompts by the keys of their requests.

    Args:
        port: to the transfer thread.
        weights: the other thing that nodes share; in the same pages.
    """

    def __init__(
        self,
        config: SharingConfig,
        *,
        instance: int,
        page_bytes: int,
        cache: RadixCache,
        pages: PageAllocator,
        tiers: Tiers,
        tables: PageTables,
        port: NodePort,
        weights: WeightSharing,
    ) -> None:
        self._tiers = tiers
        self._weights = weights
        self.loans = Loans(
            enabled=config.enabled,
            cache=cache,
            pages=pages,
            tiers=tiers,
            tables=tables,
            port=port,
        )
        self.fetches = Fetches(
            config,
            instance=instance,
            page_bytes=page_bytes,
            cache=cache,
            pages=pages,
            tables=tables,
            port=port,
        )
        self.ways = Ways()
        self.spoilt = SpoiltPrefixes(cache, port)

    @property
    def busy(self) -> bool:
        """Whether somebody reads here, or bytes may land here."""
        return bool(len(self.loans) or self.fetches.busy or self._weights.busy)

    def lent(self) -> Iterator[Ints]:
        """Pages held for publication."""
        return chain(self.loans.lent(), self._weights.lent())

    def reads(self) -> Iterator[Ints]:
        """Pages held for reads."""
        return chain(self.fetches.reads(), self._weights.reads())

    def counters(self) -> dict[str, int]:
        parts = self.loans, self.fetches, self.ways, self.spoilt
        return {name: number for part in parts for name, number in part.counters().items()}

    def fetch(
        self, request: Request, hints: tuple[PrefixAt, ...], *, room: int, queued_s: float
    ) -> bool:
        """Begins to read what another node has of its prompt, where that pays and a tier of this
        one has not as much. True: the scheduler is to have the request once `fetches.take_over` has
        its key.

        Args:
            room: pages that may be taken now.
            queued_s: until it would be its turn.
        """
        if request.computed_whole:
            return False
        way = self._tiers.way(request.token_ids[:-1], request.namespace)
        below = 0 if way is None else len(way.token_ids)
        return self.fetches.begin(
            request.key,
            request.token_ids,
            request.namespace,
            tuple(hint for hint in hints if hint.num_tokens > below),
            room=room,
            token_s=self.ways.token_s,
            queued_s=queued_s,
        )

    def admitted(self, request: Request) -> None:
        """Its turn has come, with what the tree has of it."""
        fetched = self.fetches.fetched(request.key)
        if fetched.num_tokens:
            request.given_by.append(fetched.owner)
        self.ways.admitted(request, fetched.num_tokens, time.monotonic())

    def forget(self, key: int) -> None:
        """The request has ended, wherever it was."""
        self.fetches.forget(key)
        self.ways.ended(key)

    def take(self, event: NodeEvent) -> bool:
        """Takes what the transfer thread says of a prefix. False: it is of another hand-off, or of
        interest to others too."""
        match event:
            case AskedToForget():
                self.spoilt.asked(event)
                return True
            case OwnerRate():
                self.fetches.owner_rate(event)
                return False
            case _:
                return take(event, Prefix, self.fetches, self.loans)
