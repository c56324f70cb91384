"""The data path for a proved one-sided path: the reader copies, the owner does nothing.

Proved so far: two processes of one host, by CMA. One passive agent on the owner, one agent per
connection on the reader, because destroying it is the only fence that nixl has.
"""

import math
import time
from typing import Annotated

import msgspec
import numpy as np

from common.errors import TransferError
from kvtransfer.backends.base import (
    CONNECT_S,
    Ints,
    PagePool,
    RemotePool,
    check_host_memory,
    check_pages,
    check_pool,
    parse_description,
)
from kvtransfer.backends.nixl_agent import Agent
from kvtransfer.backends.path_proof import Nonce, Place, prove_same_host
from kvtransfer.backends.scratch import Scratch, measure

_PART_BYTES = 4 << 20  # between two looks at the stop flag; CMA copies it in about 1 ms
_POLL_S = 20e-6


class _Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    place: Place
    metadata: Annotated[bytes, msgspec.Meta(max_length=1 << 16)]
    scratch_base: Annotated[int, msgspec.Meta(ge=1, lt=1 << 57)]
    scratch_pages: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class NixlOwner:
    """A passive agent with the pool registered. `poll` and `close` are for one thread."""

    def __init__(self, pool: PagePool) -> None:
        self._nonce = Nonce()
        self._scratch = Scratch(pool.page_bytes)
        self._agent = Agent()
        try:
            self._agent.register(pool)
            self._agent.register(self._scratch.pool)
            description = _Description(
                place=self._nonce.place(),
                metadata=self._agent.metadata(),
                scratch_base=self._scratch.pool.base,
                scratch_pages=self._scratch.pool.num_pages,
            )
        except BaseException:
            self._agent.destroy()
            raise
        self._description = msgspec.msgpack.encode(description)

    def describe(self, reader: int) -> bytes:
        return self._description

    def publish(self, reader: int, pages: Ints) -> None:
        """Nothing to do: nobody asks the owner."""

    def withdraw(self, reader: int, pages: Ints) -> None:
        """Nothing to do: what a late read brings is the reader's to throw away."""

    def poll(self) -> None:
        self._agent.poll()

    def close(self) -> None:
        self._agent.destroy()


class NixlConnection:
    """One agent, made for one owner process."""

    path = "cma"

    def __init__(self, description: _Description, remote: RemotePool, pool: PagePool) -> None:
        """Blocks for CONNECT_S at most, in which the owner must poll."""
        check_pool(remote, pool)
        prove_same_host(description.place)
        self._num_source = remote.num_pages
        self._num_destination = pool.num_pages
        self._scratch = Scratch(pool.page_bytes)
        self._scratch_pages = min(description.scratch_pages, self._scratch.pool.num_pages)
        self._pages_per_part = max(1, _PART_BYTES // pool.page_bytes)
        self._stopped = False
        self._agent = Agent()
        try:
            self._agent.register(pool)
            self._agent.register(self._scratch.pool)
            owner = self._agent.meet(description.metadata)
            self._source = self._agent.prepare(
                PagePool(remote.base, remote.page_bytes, remote.num_pages, "cpu"), owner
            )
            self._destination = self._agent.prepare(pool)
            self._scratch_source = self._agent.prepare(
                PagePool(description.scratch_base, pool.page_bytes, self._scratch_pages, "cpu"),
                owner,
            )
            self._scratch_destination = self._agent.prepare(self._scratch.pool)
            self._make_contact()
        except BaseException:
            self._agent.destroy()
            raise

    def probe(self) -> float:
        return measure(self._scratch_pages, self._scratch.pool.page_bytes, self._read_scratch)

    def copy(self, source_pages: Ints, destination_pages: Ints) -> None:
        check_pages(source_pages, self._num_source, destination_pages, self._num_destination)
        for start in range(0, len(source_pages), self._pages_per_part):
            part = slice(start, start + self._pages_per_part)
            self._read(self._source, source_pages[part], self._destination, destination_pages[part])

    def stop(self) -> None:
        self._stopped = True

    def close(self) -> None:
        self._stopped = True
        self._agent.destroy()

    def _make_contact(self) -> None:
        """Reads one scratch page: the owner has been reached, and reads from it work."""
        page = np.zeros(1, np.int32)
        late = time.monotonic() + CONNECT_S
        self._read(self._scratch_source, page, self._scratch_destination, page, late)

    def _read_scratch(self, pages: Ints) -> None:
        self._read(self._scratch_source, pages, self._scratch_destination, pages)

    def _read(
        self,
        source: int,
        source_pages: Ints,
        destination: int,
        destination_pages: Ints,
        late: float = math.inf,
    ) -> None:
        """Between the prepared lists of these numbers; until `late` by time.monotonic()."""
        if self._stopped:
            raise TransferError("the nixl connection has been stopped")
        landed = self._agent.post_read(destination, destination_pages, source, source_pages)
        while not landed:
            if self._stopped or time.monotonic() > late:
                raise TransferError("the owner's agent did not answer in time")
            time.sleep(_POLL_S)
            landed = self._agent.read_has_landed()


class NixlBackend:
    """Owners and readers of host memory. Loads nixl when first used."""

    name = "nixl"

    def serve(self, pool: PagePool, instance: int) -> NixlOwner:
        check_host_memory(self.name, pool)
        return NixlOwner(pool)

    def connect(
        self, description: bytes, remote: RemotePool, pool: PagePool, instance: int
    ) -> NixlConnection:
        check_host_memory(self.name, pool)
        parsed = parse_description(self.name, description, _Description)
        return NixlConnection(parsed, remote, pool)
