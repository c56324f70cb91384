"""The NIXL backend: the consumer copies pages alone, and the producer only registers its memory.

The producer has one passive agent for each path that it offers (`NixlListener`). Paths with keys
need one agent per consumer instead (`ConsumerAgents`). A consumer has one agent per connection.
paths.py lists the paths and their proofs.

Destroying a consumer's agent revokes its keys. Deregistering the memory would not be enough,
because UCX caches registrations until the agent's context ends. Each agent has its own connections,
protection domain and registration, so other consumers are not affected.

One thread creates and destroys the agents of all consumers, one after the other. An agent that is
dismissed while it is created is destroyed right afterwards. The number of agents is bounded.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec

from common.errors import EngineFault, TransferError
from common.logs import ThrottledLog, kv
from kvtransfer.backends.base import (
    CONNECT_S,
    PagePool,
    PoolRegion,
    ReadMap,
    TableSlices,
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
    """A passive agent of the producer. One thread at a time may use it, after `memory.use`."""

    def __init__(self, kind: PathKind, memory: NixlMemory) -> None:
        """Create the agent. Takes about 5 ms, plus the registration of the pool, which over RDMA
        pins every page.

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
        """Destroy the agent. No consumer can read over it afterwards. Idempotent."""
        self._agent.destroy()


# Each consumer has the pool registered. That costs 8 bytes for every page that the network card
# maps, and counts the whole pool against RLIMIT_MEMLOCK.
MAX_CONSUMERS = 64
_Made = tuple[NixlListener, ...]
_rare = ThrottledLog(logging.getLogger(__name__))


class ConsumerAgents:
    """The producer's agents for paths with keys, one set per consumer. One thread at a time may use
    it. Only `close` blocks.
    """

    def __init__(
        self, kinds: Sequence[PathKind], memory: NixlMemory, *, max_consumers: int = MAX_CONSUMERS
    ) -> None:
        """
        Args:
            kinds: paths with keys. Each consumer gets one agent for each of them.
            max_consumers: limit of consumers that have agents.
        """
        self._kinds = kinds
        self._memory = memory
        self._max_consumers = max_consumers
        self._places = threading.BoundedSemaphore(max_consumers)
        self._made: dict[int, Future[_Made]] = {}  # by consumer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="nixl-consumers")

    def prepare(self, consumer: int) -> Future[Any]:
        """Start to create a consumer's agents. The Future also completes if there are none to
        create or the limit is reached. Dismissed consumers count until their agents are destroyed.
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
        """Return the paths that are ready for the consumer."""
        made = self._made.get(consumer)
        return tuple(each.offer for each in made.result()) if made and made.done() else ()

    def dismiss(self, consumer: int) -> None:
        """Destroy the consumer's agents soon, which revokes its keys. Idempotent."""
        made = self._made.pop(consumer, None)
        if made is not None:
            made.cancel()
            self._thread.submit(self._end, made)

    def poll(self) -> None:
        """Poll all agents. Dismiss a consumer whose agent fails, without effect on the others."""
        for consumer, made in list(self._made.items()):
            try:
                for offering in made.result() if made.done() else ():
                    offering.poll()
            except TransferError as error:
                _rare.warning("consumer keys revoked", consumer=consumer, reason=error)
                self.dismiss(consumer)

    def close(self) -> None:
        """Dismiss all consumers, and block until all agents are destroyed."""
        for consumer in list(self._made):
            self.dismiss(consumer)
        self._thread.shutdown()

    # On the thread that creates them

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
    """The producer of all one-sided paths that this machine supports. For one thread at a time.

    The consumer discards the data of late reads, because the producer cannot refuse them.
    """

    publications = None

    def __init__(self, memory: NixlMemory, kinds: Sequence[PathKind]) -> None:
        """Raises TransferError if this machine supports none of the paths."""
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
            if kind.keyed:  # created only to check that the path works
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
        """Destroy the consumer's agents. On paths without keys the consumer can still read."""
        self._consumers.dismiss(consumer)

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
    """The NIXL backend, for host and device memory. Imports NIXL on first use."""

    name = "nixl"

    def __init__(
        self,
        paths: Sequence[PathKind] = PATHS,
        memory_of: Callable[[PagePool], NixlMemory] = memory_of,
    ) -> None:
        """
        Args:
            paths: paths to offer. A name may occur once for each kind of memory.
        """
        self._paths = paths
        self._memory_of = memory_of

    def serve(self, pool: PagePool, instance: int) -> NixlProducer:
        kinds = [kind for kind in self._paths if kind.memory == kind_of_memory(pool.device)]
        return NixlProducer(self._memory_of(pool), kinds)

    def connect(
        self,
        description: bytes,
        remote: PoolRegion,
        pool: PagePool,
        slices: TableSlices | None = None,
    ) -> NixlConnection:
        parsed = parse_description(self.name, description, NixlDescription)
        reads = ReadMap(remote, pool, slices)
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
