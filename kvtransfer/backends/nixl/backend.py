"""The data path over a proved one-sided path: the reader copies, the owner does nothing.

The owner has one passive agent for each path that it can offer. If the path uses keys, it has one
for each of its readers (readers.py). A reader has one agent per connection. paths.py lists the
paths and their proofs.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from common.errors import TransferError
from common.logs import kv
from kvtransfer.backends.base import (
    CONNECT_S,
    Ints,
    Moves,
    PagePool,
    RemotePool,
    parse_description,
)
from kvtransfer.backends.nixl.connection import NixlConnection, NixlDescription
from kvtransfer.backends.nixl.memory import NixlMemory, memory_of
from kvtransfer.backends.nixl.offering import NixlListener
from kvtransfer.backends.nixl.paths import PATHS, PathKind, kind_of_memory
from kvtransfer.backends.nixl.readers import ConsumerAgents
from kvtransfer.backends.read_map import ReadMap

_log = logging.getLogger(__name__)


class NixlProducer:
    """Offers every path that this machine supports. For one thread at a time."""

    def __init__(self, memory: NixlMemory, kinds: Sequence[PathKind]) -> None:
        """Raise TransferError if this machine can offer no path."""
        memory.use()
        self._memory = memory
        self._offerings: list[NixlListener] = []  # shared by all readers
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
        self._readers = ConsumerAgents(keyed, memory)
        shared = [offering.offer.path for offering in self._offerings]
        _log.info(
            "nixl offers %s",
            kv(
                paths=", ".join(shared + [kind.name for kind in keyed]),
                reason="; ".join(f"not {reason}" for reason in reasons),
            ),
        )

    def prepare(self, reader: int) -> Future[Any]:
        return self._readers.prepare(reader)

    def admit(self, reader: int) -> bytes:
        offers = *(each.offer for each in self._offerings), *self._readers.offers(reader)
        if not offers:
            raise TransferError("no agent has been made for this reader")
        return msgspec.msgpack.encode(
            NixlDescription(
                device=self._memory.pool.device,
                scratch_base=self._memory.scratch.base,
                scratch_pages=self._memory.scratch.num_pages,
                offers=offers,
            )
        )

    def dismiss(self, reader: int) -> None:
        """End the reader's agents. On paths without keys, the reader keeps its knowledge of this
        memory.
        """
        self._readers.dismiss(reader)

    def publish(self, reader: int, pages: Ints) -> None:
        """Do nothing: reads do not involve the owner."""

    def withdraw(self, reader: int, pages: Ints) -> None:
        """Do nothing: the reader discards the data of late reads."""

    def poll(self) -> None:
        self._memory.use()
        for offering in self._offerings:
            offering.poll()
        self._readers.poll()

    def close(self) -> None:
        self._memory.use()
        self._readers.close()
        for offering in self._offerings:
            offering.close()


class NixlBackend:
    """Owners and readers of host and device memory. Loads nixl on first use."""

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
                reasons.append(f"{offer.path}: not known here")
                continue
            try:
                return NixlConnection(kinds[offer.path], offer, parsed, remote, memory, reads, late)
            except TransferError as error:
                reasons.append(f"{offer.path}: {error}")
        raise TransferError(f"no one-sided path: {'; '.join(reasons)}")
