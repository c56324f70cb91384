"""Agents for one reader each, for paths that use keys: a reader's keys end with its agent.

Ending the agent revokes its keys. Deregistering the memory would not be enough: UCX keeps
registrations in a cache until the context of the agent ends. Each agent has connections, a
protection domain and a registration of its own, so other readers are not affected.

Agents are made and ended one after the other, on one thread. An agent that is dismissed while it is
being made ends right afterwards. There are never more of them than places.
"""

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from common.errors import EngineFault, TransferError
from common.logs import Throttle, ThrottledLog
from kvtransfer.backends.base import prepared
from kvtransfer.backends.nixl.connection import NixlOffer
from kvtransfer.backends.nixl.memory import NixlMemory
from kvtransfer.backends.nixl.offering import NixlListener
from kvtransfer.backends.nixl.paths import PathKind

# Each has the pool registered: 8 bytes for every page that the network card maps, and as much of
# RLIMIT_MEMLOCK as the pool has bytes.
MAX_READERS = 64

_Made = tuple[NixlListener, ...]
_log = ThrottledLog(logging.getLogger(__name__), Throttle())


class ConsumerAgents:
    """The agents of all readers. For one thread at a time. No call but `close` waits."""

    def __init__(
        self, kinds: Sequence[PathKind], memory: NixlMemory, *, max_readers: int = MAX_READERS
    ) -> None:
        """
        Args:
            kinds: each reader gets one agent for each of them.
        """
        self._kinds = kinds
        self._memory = memory
        self._max_readers = max_readers
        self._places = threading.BoundedSemaphore(max_readers)
        self._made: dict[int, Future[_Made]] = {}  # by reader
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="nixl-readers")

    def prepare(self, reader: int) -> Future[Any]:
        """Start to make a reader's agents. The Future also completes if there is none to make, or
        no place for one: readers that are gone keep their place until their agents have ended.
        """
        if not self._kinds:
            return prepared()
        if not self._places.acquire(blocking=False):
            paths = ", ".join(kind.name for kind in self._kinds)
            _log.warning("consumer gets no keys", paths=paths, reason=f"{self._max_readers} have")
            return prepared()
        self._made[reader] = self._thread.submit(self._make)
        return self._made[reader]

    def offers(self, reader: int) -> tuple[NixlOffer, ...]:
        """Return the offerings made for the reader so far."""
        made = self._made.get(reader)
        return tuple(each.offer for each in made.result()) if made and made.done() else ()

    def dismiss(self, reader: int) -> None:
        """End the reader's agents soon, and with them the use of its keys. Idempotent."""
        made = self._made.pop(reader, None)
        if made is not None:
            made.cancel()
            self._thread.submit(self._end, made)

    def poll(self) -> None:
        """Poll all agents. Dismiss readers whose agents fail: such a failure affects only that
        reader.
        """
        for reader, made in list(self._made.items()):
            try:
                for offering in made.result() if made.done() else ():
                    offering.poll()
            except TransferError as error:
                _log.warning("consumer keys revoked", consumer=reader, reason=error)
                self.dismiss(reader)

    def close(self) -> None:
        """Dismiss all readers, and wait until all agents have ended."""
        for reader in list(self._made):
            self.dismiss(reader)
        self._thread.shutdown()

    # On the thread that makes them ---------------------------------------------------------------

    def _make(self) -> _Made:
        made = []
        for kind in self._kinds:
            try:
                self._memory.use()
                made.append(NixlListener(kind, self._memory))
            except TransferError as error:
                _log.warning("consumer gets no keys", paths=kind.name, reason=error)
        return tuple(made)

    def _end(self, made: Future[_Made]) -> None:
        try:
            self._memory.use()
            for offering in () if made.cancelled() or made.exception() else made.result():
                offering.close()
        except (EngineFault, TransferError) as fault:
            _log.error("keys of a disconnected consumer not released", reason=fault)
        finally:
            self._places.release()
