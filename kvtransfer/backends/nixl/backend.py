"""The data path over a proved one-sided path: the consumer copies, the producer does nothing.

The producer has one passive agent for each path that it can offer. If the path uses keys, it has
one for each of its consumers (`ConsumerAgents`). A consumer has one agent per connection. paths.py
lists the paths and their proofs.

A consumer's keys end with its agent.

Ending the agent revokes its keys. Deregistering the memory would not be enough: UCX keeps
registrations in a cache until the context of the agent ends. Each agent has connections, a
protection domain and a registration of its own, so other consumers are not affected.

Agents are made and ended one after the other, on one thread. An agent that is dismissed while it is
being made ends right afterwards. There are never more of them than places.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec

from common.errors import EngineFault, TransferError
from common.logs import Throttle, ThrottledLog, kv
from kvtransfer.backends.base import (
    CONNECT_S,
    Ints,
    Moves,
    PagePool,
    ReadMap,
    RemotePool,
    parse_description,
    prepared,
)
from kvtransfer.backends.nixl.agent import (
    NixlAgent,
    NixlConnection,
    NixlDescription,
    NixlMemory,
    NixlOffer,
    memory_of,
)
from kvtransfer.backends.nixl.paths import PATHS, PathEvidence, PathKind, kind_of_memory


class NixlListener:
    """A passive agent of the producer. For one thread at a time, which has called `memory.use`."""

    def __init__(self, kind: PathKind, memory: NixlMemory) -> None:
        """Make the agent. Takes about 5 ms and a registration of the pool, which over RDMA pins
        every page of it.

        Raises:
            TransferError: this machine cannot offer the path.
        """
        self._evidence: PathEvidence = kind.evidence(memory.pool, memory.scratch)
        self._polled = kind.transports.polled
        self._agent = NixlAgent(kind.transports)
        try:
            self._agent.register(memory.pool)
            self._agent.register(memory.scratch)
            metadata = self._agent.metadata()
            self.offer = NixlOffer(kind.name, self._evidence.describe(metadata), metadata)
        except BaseException:
            self._agent.destroy()
            raise

    def poll(self) -> None:
        if self._polled:
            self._agent.poll()

    def close(self) -> None:
        """End the agent. No consumer can read over it afterwards. Idempotent."""
        self._agent.destroy()


# Each has the pool registered: 8 bytes for every page that the network card maps, and as much of
# RLIMIT_MEMLOCK as the pool has bytes.
MAX_CONSUMERS = 64
_Made = tuple[NixlListener, ...]
_rare = ThrottledLog(logging.getLogger(__name__), Throttle())


class ConsumerAgents:
    """The agents of all consumers. For one thread at a time. No call but `close` waits."""

    def __init__(
        self, kinds: Sequence[PathKind], memory: NixlMemory, *, max_consumers: int = MAX_CONSUMERS
    ) -> None:
        """
        Args:
            kinds: each consumer gets one agent for each of them.
        """
        self._kinds = kinds
        self._memory = memory
        self._max_consumers = max_consumers
        self._places = threading.BoundedSemaphore(max_consumers)
        self._made: dict[int, Future[_Made]] = {}  # by consumer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="nixl-consumers")

    def prepare(self, consumer: int) -> Future[Any]:
        """Start to make a consumer's agents. The Future also completes if there is none to make, or
        no place for one: consumers that are gone keep their place until their agents have ended.
        """
        if not self._kinds:
            return prepared()
        if not self._places.acquire(blocking=False):
            paths = ", ".join(kind.name for kind in self._kinds)
            _rare.warning(
                "consumer gets no keys",
                paths=paths,
                reason=f"{self._max_consumers} have keys already",
            )
            return prepared()
        self._made[consumer] = self._thread.submit(self._make)
        return self._made[consumer]

    def offers(self, consumer: int) -> tuple[NixlOffer, ...]:
        """Return the offerings made for the consumer so far."""
        made = self._made.get(consumer)
        return tuple(each.offer for each in made.result()) if made and made.done() else ()

    def dismiss(self, consumer: int) -> None:
        """End the consumer's agents soon, and with them the use of its keys. Idempotent."""
        made = self._made.pop(consumer, None)
        if made is not None:
            made.cancel()
            self._thread.submit(self._end, made)

    def poll(self) -> None:
        """Poll all agents. Dismiss consumers whose agents fail: such a failure affects only that
        consumer.
        """
        for consumer, made in list(self._made.items()):
            try:
                for offering in made.result() if made.done() else ():
                    offering.poll()
            except TransferError as error:
                _rare.warning("consumer keys revoked", consumer=consumer, reason=error)
                self.dismiss(consumer)

    def close(self) -> None:
        """Dismiss all consumers, and wait until all agents have ended."""
        for consumer in list(self._made):
            self.dismiss(consumer)
        self._thread.shutdown()

    # On the thread that makes them ---------------------------------------------------------------

    def _make(self) -> _Made:
        made = []
        for kind in self._kinds:
            try:
                self._memory.use()
                made.append(NixlListener(kind, self._memory))
            except TransferError as error:
                _rare.warning("consumer gets no keys", paths=kind.name, reason=error)
        return tuple(made)

    def _end(self, made: Future[_Made]) -> None:
        try:
            self._memory.use()
            for offering in () if made.cancelled() or made.exception() else made.result():
                offering.close()
        except (EngineFault, TransferError) as fault:
            _rare.error("keys of a disconnected consumer not released", reason=fault)
        finally:
            self._places.release()


_log = logging.getLogger(__name__)


class NixlProducer:
    """Offers every path that this machine supports. For one thread at a time."""

    def __init__(self, memory: NixlMemory, kinds: Sequence[PathKind]) -> None:
        """Raise TransferError if this machine can offer no path."""
        memory.use()
        self._memory = memory
        self._offerings: list[NixlListener] = []  # shared by all consumers
        keyed: list[PathKind] = []
        reasons = []
        for kind in kinds:
            try:
                offering = NixlListener(kind, memory)
            except TransferError as error:
                reasons.append(f"{kind.name}: {error}")
                continue
            if kind.keyed:  # made only to check that the path works
                offering.close()
                keyed.append(kind)
            else:
                self._offerings.append(offering)
        if not self._offerings and not keyed:
            raise TransferError(f"no one-sided path: {'; '.join(reasons)}")
        self._consumers = ConsumerAgents(keyed, memory)
        shared = [offering.offer.path for offering in self._offerings]
        _log.info(
            "nixl offers %s",
            kv(
                paths=", ".join(shared + [kind.name for kind in keyed]),
                reason="; ".join(f"not {reason}" for reason in reasons),
            ),
        )

    def prepare(self, consumer: int) -> Future[Any]:
        return self._consumers.prepare(consumer)

    def admit(self, consumer: int) -> bytes:
        offers = *(each.offer for each in self._offerings), *self._consumers.offers(consumer)
        if not offers:
            raise TransferError("no agent has been made for this consumer")
        return msgspec.msgpack.encode(
            NixlDescription(
                device=self._memory.pool.device,
                scratch_base=self._memory.scratch.base,
                scratch_pages=self._memory.scratch.num_pages,
                offers=offers,
            )
        )

    def dismiss(self, consumer: int) -> None:
        """End the consumer's agents. On paths without keys, the consumer keeps its knowledge of
        this memory.
        """
        self._consumers.dismiss(consumer)

    def publish(self, consumer: int, pages: Ints) -> None:
        """Do nothing: reads do not involve the producer."""

    def withdraw(self, consumer: int, pages: Ints) -> None:
        """Do nothing: the consumer discards the data of late reads."""

    def poll(self) -> None:
        self._memory.use()
        for offering in self._offerings:
            offering.poll()
        self._consumers.poll()

    def close(self) -> None:
        self._memory.use()
        self._consumers.close()
        for offering in self._offerings:
            offering.close()


class NixlBackend:
    """Producers and consumers of host and device memory. Loads nixl on first use."""

    name = "nixl"

    def __init__(
        self,
        paths: Sequence[PathKind] = PATHS,
        memory_of: Callable[[PagePool], NixlMemory] = memory_of,
    ) -> None:
        """
        Args:
            paths: a name may occur once for each kind of memory.
        """
        self._paths = paths
        self._memory_of = memory_of

    def serve(self, pool: PagePool, instance: int) -> NixlProducer:
        kinds = [kind for kind in self._paths if kind.memory == kind_of_memory(pool.device)]
        return NixlProducer(self._memory_of(pool), kinds)

    def connect(
        self,
        description: bytes,
        remote: RemotePool,
        pool: PagePool,
        moves: Moves | None = None,
    ) -> NixlConnection:
        parsed = parse_description(self.name, description, NixlDescription)
        reads = ReadMap(remote, pool, moves)
        memory = self._memory_of(pool)
        where = kind_of_memory(pool.device)
        if kind_of_memory(parsed.device) != where:
            raise TransferError(f"no one-sided path from {parsed.device} to {pool.device}")
        kinds = {kind.name: kind for kind in self._paths if kind.memory == where}
        late = time.monotonic() + CONNECT_S
        reasons = []
        for offer in parsed.offers:
            if offer.path not in kinds:
                reasons.append(f"{offer.path}: unknown path")
                continue
            try:
                return NixlConnection(kinds[offer.path], offer, parsed, remote, memory, reads, late)
            except TransferError as error:
                reasons.append(f"{offer.path}: {error}")
        raise TransferError(f"no one-sided path: {'; '.join(reasons)}")
