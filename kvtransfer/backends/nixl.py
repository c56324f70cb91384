"""The data path for a proved one-sided path: the reader copies, the owner does nothing.

One passive agent for each path that the owner can offer, and one agent per connection on the
reader. nixl_paths.py says which paths there are, and what proves them.
"""

import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from common.errors import TransferError
from common.logs import kv
from kvtransfer.backends.base import (
    CONNECT_S,
    Ints,
    PagePool,
    RemotePool,
    check_pool,
    parse_description,
)
from kvtransfer.backends.nixl_agent import Agent
from kvtransfer.backends.nixl_connection import Description, NixlConnection, Offer
from kvtransfer.backends.nixl_memory import Memory, memory_of
from kvtransfer.backends.nixl_paths import PATHS, Evidence, PathKind, kind_of_memory

_log = logging.getLogger(__name__)


class _Offering:
    """One path that an owner offers: a passive agent with the pool registered."""

    def __init__(self, kind: PathKind, memory: Memory) -> None:
        """Raises TransferError where this machine cannot offer it."""
        self._evidence: Evidence = kind.evidence(memory.pool, memory.scratch)
        self._polled = kind.transports.polled
        self._agent = Agent(kind.transports)
        try:
            self._agent.register(memory.pool)
            self._agent.register(memory.scratch)
            metadata = self._agent.metadata()
            self.offer = Offer(kind.name, self._evidence.tell(metadata), metadata)
        except BaseException:
            self._agent.destroy()
            raise

    def poll(self) -> None:
        if self._polled:
            self._agent.poll()

    def close(self) -> None:
        self._agent.destroy()


class NixlOwner:
    """Offers every path that this machine has. `poll` and `close` are for one thread at a time."""

    def __init__(self, memory: Memory, kinds: Sequence[PathKind]) -> None:
        """Raises TransferError where it can offer none."""
        memory.use()
        self._memory = memory
        self._offerings: list[_Offering] = []
        reasons = []
        for kind in kinds:
            try:
                self._offerings.append(_Offering(kind, memory))
            except TransferError as error:
                reasons.append(f"{kind.name}: {error}")
        if not self._offerings:
            raise TransferError(f"no one-sided path: {'; '.join(reasons)}")
        _log.info(
            "nixl offers %s",
            kv(
                paths=", ".join(offering.offer.path for offering in self._offerings),
                because="; ".join(f"not {reason}" for reason in reasons),
            ),
        )
        self._description = msgspec.msgpack.encode(
            Description(
                device=memory.pool.device,
                scratch_base=memory.scratch.base,
                scratch_pages=memory.scratch.num_pages,
                offers=tuple(offering.offer for offering in self._offerings),
            )
        )

    def admit(self, reader: int) -> bytes:
        return self._description

    def dismiss(self, reader: int) -> None:
        """Nothing to do: what a reader knows of this memory it goes on knowing."""

    def publish(self, reader: int, pages: Ints) -> None:
        """Nothing to do: nobody asks the owner."""

    def withdraw(self, reader: int, pages: Ints) -> None:
        """Nothing to do: what a late read brings is the reader's to throw away."""

    def poll(self) -> None:
        self._memory.use()
        for offering in self._offerings:
            offering.poll()

    def close(self) -> None:
        self._memory.use()
        for offering in self._offerings:
            offering.close()


class NixlBackend:
    """Owners and readers of host and device memory. Loads nixl when first used."""

    name = "nixl"

    def __init__(
        self,
        paths: Sequence[PathKind] = PATHS,
        memory_of: Callable[[PagePool], Memory] = memory_of,
    ) -> None:
        """`paths` may hold a name once for each kind of memory."""
        self._paths = paths
        self._memory_of = memory_of

    def serve(self, pool: PagePool, instance: int) -> NixlOwner:
        kinds = [kind for kind in self._paths if kind.memory == kind_of_memory(pool.device)]
        return NixlOwner(self._memory_of(pool), kinds)

    def connect(self, description: bytes, remote: RemotePool, pool: PagePool) -> NixlConnection:
        parsed = parse_description(self.name, description, Description)
        check_pool(remote, pool)
        memory = self._memory_of(pool)
        where = kind_of_memory(pool.device)
        if kind_of_memory(parsed.device) != where:
            raise TransferError(f"no one-sided path from {parsed.device} to {pool.device}")
        kinds = {kind.name: kind for kind in self._paths if kind.memory == where}
        late = time.monotonic() + CONNECT_S
        reasons = []
        for offer in parsed.offers:
            if offer.path not in kinds:
                reasons.append(f"{offer.path}: not known here")
                continue
            try:
                return NixlConnection(kinds[offer.path], offer, parsed, remote, memory, late)
            except TransferError as error:
                reasons.append(f"{offer.path}: {error}")
        raise TransferError(f"no one-sided path: {'; '.join(reasons)}")
