"""Index of the prefixes that nodes probably have cached, for prefix-aware routing.

A prefix is identified by a hash that includes its namespace, so namespaces never match each other.
The index has two sources: cache events from nodes, which are exact but slightly delayed, and this
router's history of placements, which is a guess. For a node with events, the history only covers
the delay of the events. For other nodes it is the only source.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import grpc.aio
from xxhash import xxh3_64_intdigest

from common import rpc
from common.errors import ProtocolViolation
from common.logs import kv
from common.request import MAX_HINTS, PrefixHint
from common.requests.namespace import BYTES_PER_TOKEN, SHARED, Namespace, PrefixHasher, as_bytes
from protos import node_pb2, node_pb2_grpc
from router.policy.load import PlacementDecision, PlacementKey

log = logging.getLogger(__name__)

MAX_PAGES = 1 << 18  # per node, from events: 4 Mi tokens in pages of 16, about 25 MB
MAX_PAGE_SIZE = 1 << 12  # tokens
# History has prefixes whose length is a multiple of this many tokens.
STRIDE = 128
MAX_HISTORY = 1 << 15  # prefixes per node: 4 Mi tokens
HISTORY_S = 10.0  # seconds for which history is kept at least, for a node with events
LEAST_TOKENS = 64  # minimum advantage of a hint; a shorter fetch is not worthwhile
MOST_HINTS = MAX_HINTS - 1  # one less than the limit, because a decode node adds itself


class PromptPrefixes:
    """Hashes of the prefixes of one prompt, computed on demand."""

    __slots__ = ("_begin", "_bytes", "_names", "_strides", "num_tokens")

    def __init__(self, token_ids: Sequence[int], namespace: Namespace = SHARED) -> None:
        self.num_tokens = len(token_ids)
        self._begin = len(namespace)  # index of the first token, after the namespace
        self._bytes = memoryview(namespace + as_bytes(token_ids))
        self._names: dict[int, int] = {}
        self._strides: list[int] | None = None

    def name(self, num_tokens: int) -> int:
        """Return the hash of the first `num_tokens` tokens."""
        name = self._names.get(num_tokens)
        if name is None:
            prefix = self._bytes[: self._begin + num_tokens * BYTES_PER_TOKEN]
            name = self._names[num_tokens] = xxh3_64_intdigest(prefix)
        return name

    @property
    def strides(self) -> list[int]:
        """Hashes of all prefixes whose length is a multiple of the stride, shortest first."""
        if self._strides is None:
            hasher = PrefixHasher(self._bytes[: self._begin])
            self._strides = hasher.extend(self._bytes[self._begin :], STRIDE)
        return self._strides


class PrefixIndex:
    """Index for all nodes, bounded per node. For one event loop.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._nodes: dict[str, _Node] = {}

    def cached_tokens(self, prompt: PromptPrefixes, address: str) -> int:
        """Return how many prompt tokens the node has cached. 0 for an unknown node."""
        node = self._nodes.get(address)
        return node.match(prompt) if node else 0

    def reported_tokens(self, prompt: PromptPrefixes, address: str) -> int:
        """Return how many prompt tokens the node has cached according to its events alone."""
        node = self._nodes.get(address)
        return node.match_reported(prompt) if node else 0

    def hints(self, key: PlacementKey, placement: PlacementDecision) -> tuple[PrefixHint, ...]:
        """Return other nodes with more of a prompt cached than the node that computes it.

        The longest prefix is first. The computing node may fetch the prefix from a hinted node. A
        wrong or outdated hint costs one request at most.
        """
        computes = placement.prefill[0] if placement.prefill else placement.decode
        known = {address for address, node in self._nodes.items() if node.reported}
        known -= {computes, placement.decode}
        if not known:
            return ()
        prompt = PromptPrefixes(key.token_ids, key.namespace)
        least = self.reported_tokens(prompt, computes) + LEAST_TOKENS
        reported = ((self.reported_tokens(prompt, address), address) for address in known)
        most = sorted(((has, address) for has, address in reported if has >= least), reverse=True)
        return tuple(PrefixHint(address, has) for has, address in most[:MOST_HINTS])

    def placed(self, prompt: PromptPrefixes, address: str) -> None:
        """Record that the node is about to compute the prompt."""
        self._node(address).remember(prompt.strides, self._clock())

    def changed(
        self,
        address: str,
        page_size: int,
        *,
        cleared: bool,
        stored: Iterable[int] = (),
        removed: Iterable[int] = (),
    ) -> None:
        """Apply cache events of a node.

        A page is identified by the hash of the prefix that ends with it.

        Args:
            page_size: tokens per page.
            cleared: drop all earlier events first.
            stored: pages added. Pages beyond MAX_PAGES are ignored.
        Raises:
            ProtocolViolation: the page size is impossible.
        """
        if not 1 <= page_size <= MAX_PAGE_SIZE:
            raise ProtocolViolation(f"its pages have {page_size} tokens")
        node = self._node(address)
        if cleared or node.page_size != page_size:
            node.clear()
            node.page_size = page_size
        node.change(stored, removed)

    def silent(self, address: str) -> None:
        """Drop the events of a node whose event stream has ended, because they become outdated."""
        if address in self._nodes:
            self._nodes[address].stop_reporting()

    def forget(self, address: str) -> None:
        self._nodes.pop(address, None)

    def num_pages(self, address: str) -> int:
        """Return the number of pages known from the node's events."""
        return len(self._nodes[address].reported) if address in self._nodes else 0

    def _node(self, address: str) -> "_Node":
        node = self._nodes.get(address)
        if node is None:
            node = self._nodes[address] = _Node()
        return node


class _Node:
    """Prefixes of one node. A node with a prefix also has all shorter ones."""

    def __init__(self) -> None:
        self.page_size = 1
        self.reported: set[int] = set()
        self._reports = False
        # History has two generations, so that dropping the older one costs nothing per prefix.
        self._recent: dict[int, None] = {}
        self._older: dict[int, None] = {}
        self._since = 0.0  # when `_recent` was started, by the clock

    def match(self, prompt: PromptPrefixes) -> int:
        """Return the length of the longest cached prefix in tokens."""
        reported = self.match_reported(prompt)
        # Begin with the first stride beyond the events, where only history can add.
        strides = prompt.strides[reported // STRIDE :] if self._recent or self._older else ()
        known = reported // STRIDE
        for name in strides:
            if name not in self._recent and name not in self._older:
                break
            known += 1
        return max(reported, known * STRIDE)

    def remember(self, strides: list[int], now: float) -> None:
        limit = MAX_HISTORY // 2
        aged = self._reports and now - self._since > HISTORY_S
        if aged or len(self._recent) + len(strides) > limit:
            self._older, self._recent, self._since = self._recent, {}, now
        self._recent.update(dict.fromkeys(strides[:limit]))

    def change(self, stored: Iterable[int], removed: Iterable[int]) -> None:
        self._reports = True
        gone = list(removed)
        self.reported.difference_update(gone)
        for name in gone:
            self._recent.pop(name, None)
            self._older.pop(name, None)
        self.reported.update(islice(stored, MAX_PAGES - len(self.reported)))

    def clear(self) -> None:
        self.reported.clear()
        self._recent.clear()
        self._older.clear()

    def stop_reporting(self) -> None:
        self.reported.clear()
        self._reports = False

    def match_reported(self, prompt: PromptPrefixes) -> int:
        """Return the tokens cached according to events, in O(log(pages)).

        The first page is checked first, because most uncached prompts differ in it.
        """
        if not self.reported:
            return 0
        reported, size = self.reported, self.page_size
        low, high = 0, prompt.num_tokens // size
        middle = 0
        while low < high:
            if prompt.name((middle + 1) * size) in reported:
                low = middle + 1
            else:
                high = middle
            middle = (low + high) // 2
        return low * size


_MIN_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 5.0
_MAX_PER_EVENT = 1 << 16  # pages stored or removed. A node sends at most half of it


class CacheWatch:
    """Subscriptions to the cache events of all nodes, for the prefix index. For one event loop.

    While the WatchCache call to a node fails, the index uses this router's history of placements.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    async def run(self, address: str, channel: grpc.aio.Channel) -> None:
        """Update the prefix index by the events of one node until cancelled, then drop the node."""
        stub = node_pb2_grpc.NodeStub(channel)  # type: ignore[no-untyped-call]
        backoff_s = _MIN_BACKOFF_S
        logged = ""
        try:
            while True:
                heard, reason = await self._listen(address, stub)
                rpc.raise_if_cancelled()
                if reason != logged:
                    logged = reason
                    fields = kv(node=address, reason=reason)
                    if heard:
                        log.info("prefix cache subscription ended %s", fields)
                    else:
                        log.info("prefix cache subscription not started %s", fields)
                if heard:
                    backoff_s = _MIN_BACKOFF_S
                self._index.silent(address)
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
        finally:
            self._index.forget(address)

    async def _listen(self, address: str, stub: node_pb2_grpc.NodeStub) -> tuple[bool, str]:
        """Read one call to its end. Returns whether events came, and why it ended."""
        heard = False
        # Without wait_for_ready: a waiting call would keep outdated certificates.
        call = stub.WatchCache(node_pb2.WatchCacheRequest())
        try:
            async for events in call:
                if events is None:  # grpcio returns None for bytes that it cannot parse
                    raise ProtocolViolation("invalid message")
                if len(events.stored) > _MAX_PER_EVENT or len(events.removed) > _MAX_PER_EVENT:
                    raise ProtocolViolation("its message is too large")
                if not heard:
                    if not events.cleared:
                        raise ProtocolViolation("its first message does not reset the cache index")
                    heard = True
                    log.info("prefix cache subscription started %s", kv(node=address))
                self._index.changed(
                    address,
                    events.page_size,
                    cleared=events.cleared,
                    stored=events.stored,
                    removed=events.removed,
                )
        except (grpc.aio.AioRpcError, ProtocolViolation) as error:
            details = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            return heard, details or "no reason given"
        finally:
            call.cancel()
        return heard, "the node has ended the call"
