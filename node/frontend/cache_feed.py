"""The front's side of Node.WatchCache: streams of the prefix cache's content and changes.

The engine tracks the cache. Here each watcher has a stream, which starts with its own snapshot. At
the limit, the host with the most watchers loses one, so that it cannot displace other hosts.
"""

import asyncio
import itertools
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from common.errors import Overloaded, ServingError
from common.rpc.streams import OutgoingStream
from node.frontend.engine_link import EngineLink
from node.messages import CacheEventBatch, WatchCache
from protos import node_pb2

MAX_WATCHERS = 64
MAX_UNSENT_BYTES = 16 << 20  # of one watcher; twice a snapshot of 1 Mi pages


@dataclass(slots=True, eq=False)
class _Watcher:
    host: str
    outgoing: OutgoingStream[node_pb2.CacheEvents] = field(
        default_factory=lambda: OutgoingStream(max_bytes=MAX_UNSENT_BYTES)
    )
    begun: bool = False  # everything has been sent to it


class CacheFeed:
    """The watchers' streams. Event loop only."""

    def __init__(self, engine: EngineLink) -> None:
        self._engine = engine
        self._numbers = itertools.count(1)
        self._watchers: dict[int, _Watcher] = {}

    async def watch(
        self, host: str, write: Callable[[node_pb2.CacheEvents], Awaitable[None]]
    ) -> None:
        """Write everything, then every change, until cancelled.

        Args:
            host: the watcher's.
        Raises:
            NodeUnavailable: the engine is not there, or the node ends.
            Overloaded: it was displaced by another watcher, or does not read.
        """
        self._engine.check_ready()
        if len(self._watchers) >= MAX_WATCHERS:
            self._make_room()
        number, watcher = next(self._numbers), _Watcher(host)
        self._watchers[number] = watcher
        self._engine.send(WatchCache(number, on=True))
        try:
            await watcher.outgoing.converse(write, _nothing(), _ignore)
        finally:
            self._watchers.pop(number, None)
            self._engine.send(WatchCache(number, on=False))

    def _make_room(self) -> None:
        """End the oldest watcher of the host with the most watchers. If it reconnects, it starts
        again with a snapshot.
        """
        hosts = Counter(watcher.host for watcher in self._watchers.values())
        [(greediest, _)] = hosts.most_common(1)
        oldest = next(n for n, watcher in self._watchers.items() if watcher.host == greediest)
        self._watchers.pop(oldest).outgoing.end(
            Overloaded(f"more than {MAX_WATCHERS} calls watch the cache")
        )

    def changed(self, change: CacheEventBatch) -> None:
        """Forward the engine's change, to new watchers or to all that have received everything."""
        events = node_pb2.CacheEvents(
            page_size=change.page_size,
            cleared=change.cleared,
            stored=_integers(change.stored),
            removed=_integers(change.removed),
        )
        for number in change.watchers or self._watchers:
            watcher = self._watchers.get(number)
            if watcher is None:
                continue  # it has disconnected meanwhile
            watcher.begun = watcher.begun or bool(change.watchers)
            if watcher.begun:
                watcher.outgoing.put(events)

    def end(self, error: ServingError) -> None:
        """End every stream with `error`."""
        for watcher in self._watchers.values():
            watcher.outgoing.close(error)


def _integers(packed: bytes) -> "array[int]":
    integers = array("Q")
    integers.frombytes(packed)
    return integers


async def _nothing() -> AsyncIterator[None]:
    """Yield a watcher's messages after its request: none, so it waits until cancelled."""
    await asyncio.Event().wait()
    yield


async def _ignore(_: None) -> None:
    """Do nothing: there is no message."""
