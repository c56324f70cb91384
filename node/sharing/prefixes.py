"""Both ends of prefix sharing at one node: its exports, and its fetches for prompts to compute."""

import time
from collections.abc import Iterator
from itertools import chain

from common.config import PrefixSharingConfig
from common.page_tables import PageTables
from common.requests.prefix_hint import PrefixHint
from engine.batch.batch import Ints
from engine.batch.request import Request
from engine.kv_cache.pages import PageAllocator
from engine.kv_cache.radix import PrefixCache
from engine.offload.cache_tiers import CacheTiers
from kvtransfer.messages import Prefix
from kvtransfer.ports import InvalidateEvent, NodeEvent, OwnerRate
from node.sharing.corrupt_prefixes import CorruptPrefixes
from node.sharing.ends import take
from node.sharing.exports import PrefixExports
from node.sharing.fetches import PrefixFetches
from node.sharing.prefix_sources import PrefixSources
from node.sharing.weights import WeightSharing


class PrefixSharing:
    """The prefix sharing of a node. Engine thread only. Prompts by the keys of their requests.

    Args:
        weights: weight sharing, which uses the same pages and is the port to the transfer thread.
    """

    def __init__(
        self,
        config: PrefixSharingConfig,
        *,
        instance: int,
        page_bytes: int,
        cache: PrefixCache,
        pages: PageAllocator,
        tiers: CacheTiers,
        tables: PageTables,
        weights: WeightSharing,
    ) -> None:
        self._tiers = tiers
        self._weights = weights
        self.loans = PrefixExports(
            enabled=config.enabled,
            cache=cache,
            pages=pages,
            tiers=tiers,
            tables=tables,
            port=weights,
        )
        self.fetches = PrefixFetches(
            config,
            instance=instance,
            page_bytes=page_bytes,
            cache=cache,
            pages=pages,
            tables=tables,
            port=weights,
        )
        self.ways = PrefixSources()
        self.corrupt_prefixes = CorruptPrefixes(cache, weights)

    @property
    def busy(self) -> bool:
        """Return whether another node reads here, or bytes may land or be copied here."""
        reads = self.fetches.busy or self._weights.busy or self._tiers.busy
        return bool(reads or len(self.loans))

    def lent(self) -> Iterator[Ints]:
        """Return the pages held for publication."""
        return chain(self.loans.lent(), self._weights.lent())

    def reads(self) -> Iterator[Ints]:
        """Return the pages held for reads."""
        return chain(self.fetches.reads(), self._weights.reads())

    def counters(self) -> dict[str, int]:
        parts = self.loans, self.fetches, self.ways, self.corrupt_prefixes
        return {name: number for part in parts for name, number in part.counters().items()}

    def fetch(
        self, request: Request, hints: tuple[PrefixHint, ...], *, room: int, queued_s: float
    ) -> bool:
        """Start to read another node's part of the prompt, if that pays and no offload tier of this
        node has as much. Returns True if the scheduler must wait until `fetches.take_over` has the
        key.

        Args:
            room: pages that may be used now.
            queued_s: seconds until it would be scheduled.
        """
        if request.computed_whole:
            return False
        way = self._tiers.way(request.token_ids[:-1], request.namespace)
        below = 0 if way is None else len(way.token_ids)
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
        """Record an admitted request, with the prefix that the tree has."""
        fetched = self.fetches.fetched(request.key)
        if fetched.num_tokens:
            request.given_by.append(fetched.owner)
        self.ways.admitted(request, fetched.num_tokens, time.monotonic())

    def forget(self, key: int) -> None:
        """Forget an ended request, in any stage."""
        self.fetches.forget(key)
        self.ways.ended(key)

    def take(self, event: NodeEvent) -> bool:
        """Handle an event of the transfer thread about a prefix. Returns False if it belongs to
        another hand-off, or if other parts need it too.
        """
        match event:
            case InvalidateEvent():
                self.corrupt_prefixes.asked(event)
                return True
            case OwnerRate():
                self.fetches.owner_rate(event)
                return False
            case _:
                return take(event, Prefix, self.fetches, self.loans)
