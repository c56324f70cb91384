"""Owners and readers of pages as tests of the data paths use them: far (in another process) or,
of loopback, near. `Ends` makes them and ends them all."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from common.errors import TransferError
from kvtransfer.backends.base import BackendConnection, Ints, Moves, RemotePool, TransferBackend
from kvtransfer.backends.path_proof import prove_same_host
from kvtransfer.backends.tcp.wire import INTRODUCTION, KEY_BYTES, MAGIC, TcpDescription, TcpProofs
from tests.support.data_children import (
    READER,
    REPLY_S,
    Child,
    Memory,
    content,
    make_memory,
    nonce_program,
    owner_program,
    reader_program,
)


def wait_for(condition: Callable[[], bool], timeout_s: float = REPLY_S) -> None:
    """For what another thread or process brings about without telling."""
    late = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < late, "it does not come about"
        time.sleep(0.0005)


def introduction(told: TcpDescription) -> bytes:
    """Return the first message of a reader on a new connection."""
    count = time.monotonic_ns()
    return INTRODUCTION.pack(MAGIC, told.reader, count, TcpProofs.by(told.key, count).of_reader)


def introduced(description: bytes) -> socket.socket:
    """A raw connection to an owner of tcp, that has proved to be the reader of the description."""
    told = msgspec.msgpack.decode(description, type=TcpDescription)
    raw = socket.create_connection((told.host, told.port), 5)
    raw.settimeout(None)
    raw.sendall(introduction(told))
    assert len(raw.recv(KEY_BYTES, socket.MSG_WAITALL)) == KEY_BYTES
    return raw


def changed(description: TcpDescription, **fields: object) -> bytes:
    """Return the description of a tcp owner with some fields changed."""
    return msgspec.msgpack.encode(msgspec.structs.replace(description, **fields))


class FarOwner:
    """An owner in another process."""

    def __init__(
        self, backend: str, num_pages: int, page_bytes: int, *, seed: int, log: Path, apart: str
    ) -> None:
        self.content = content(seed, num_pages, page_bytes)
        self.child = Child(
            owner_program,
            apart,
            backend,
            num_pages,
            page_bytes,
            seed,
            log=log,
            on_gpu=backend.endswith("-cuda"),
        )
        self._remote: RemotePool | None = None

    @property
    def remote(self) -> RemotePool:
        """Waits until the owner serves. Skips the test if this machine keeps it from moving."""
        if self._remote is None:
            told = self.child.receive()
            if isinstance(told, str):
                pytest.skip(f"no namespace can be made: {told}")
            self._remote = told
        return self._remote

    def admit(self, reader: int = READER) -> bytes:
        assert self.remote
        description: bytes = self.child.ask("admit", reader)
        return description

    def dismiss(self, reader: int = READER) -> None:
        self.child.ask("dismiss", reader)

    def publish(self, reader: int, pages: Ints) -> None:
        assert self.remote
        self.child.ask("publish", reader, pages)

    def withdraw(self, reader: int, pages: Ints) -> None:
        self.child.ask("withdraw", reader, pages)

    def publish_all(self, reader: int = READER) -> None:
        self.publish(reader, np.arange(len(self.content), dtype=np.int32))

    def has_run(self) -> None:
        """Returns once the owner's loop has turned."""
        assert self.child.ask("nothing") is None

    def end(self) -> None:
        """Makes it die as a process does that nobody expected to."""
        self.child.kill()


class NearOwner:
    """The same for loopback, whose owners live in the reader's process."""

    def __init__(
        self, backend: TransferBackend, num_pages: int, page_bytes: int, *, seed: int
    ) -> None:
        self.content = content(seed, num_pages, page_bytes)
        self._memory = Memory(num_pages, page_bytes)
        self._memory.pages[:] = self.content
        self._owner = backend.serve(self._memory.pool, seed)
        self.remote = self._memory.remote

    def admit(self, reader: int = READER) -> bytes:
        return self._owner.admit(reader)

    def dismiss(self, reader: int = READER) -> None:
        self._owner.dismiss(reader)

    def publish(self, reader: int, pages: Ints) -> None:
        self._owner.publish(reader, pages)

    def withdraw(self, reader: int, pages: Ints) -> None:
        self._owner.withdraw(reader, pages)

    def publish_all(self, reader: int = READER) -> None:
        self.publish(reader, np.arange(len(self.content), dtype=np.int32))

    def end(self) -> None:
        self._owner.close()


class FarReader:
    """A reader in another process. It reads all of an owner's pages again and again, in a random
    order, and reports what it meets."""

    def __init__(self, backend: str, num_pages: int, page_bytes: int, *, log: Path) -> None:
        self.child = Child(
            reader_program,
            backend,
            num_pages,
            page_bytes,
            log=log,
            on_gpu=backend.endswith("-cuda"),
        )
        assert self.child.receive() == "started"

    def read_from(self, owner: FarOwner) -> None:
        """Returns once its first copy has landed, right in every byte; it goes on copying."""
        landed = self.child.ask(owner.admit(), owner.remote, owner.content)
        assert landed == "landed", landed

    def failed(self) -> None:
        """Waits until the copying has ended, with an error."""
        self.child.receive()


def one_sided_refusal(log: Path) -> str:
    """Why this machine's processes may not read each other's memory; empty if they may."""
    child = Child(nonce_program, log=log)
    try:
        prove_same_host(child.receive(), b"metadata")
    except TransferError as error:
        return str(error)
    finally:
        child.kill()
    return ""


@contextmanager
def closing(connection: BackendConnection) -> Iterator[BackendConnection]:
    """Stops and closes a BackendConnection, whatever has become of it."""
    try:
        yield connection
    finally:
        connection.stop()
        connection.close()


class Ends:
    """Makes owners and readers, and ends them all."""

    def __init__(self, log: Path, exits: ExitStack) -> None:
        self.log = log
        self._exits = exits
        self._num_owners = 0
        self._memories: list[Memory] = []  # must outlive their connections

    def owner(
        self, backend: TransferBackend, num_pages: int, page_bytes: int
    ) -> FarOwner | NearOwner:
        """In another process, but of loopback."""
        if backend.name == "loopback":
            self._num_owners += 1
            near = NearOwner(backend, num_pages, page_bytes, seed=self._num_owners)
            self._exits.callback(near.end)
            return near
        return self.far_owner(backend.name, num_pages, page_bytes)

    def far_owner(self, backend: str, num_pages: int, page_bytes: int, apart: str = "") -> FarOwner:
        """apart: the namespace, "ipc" or "pid", that it does not share with others."""
        self._num_owners += 1
        owner = FarOwner(
            backend, num_pages, page_bytes, seed=self._num_owners, log=self.log, apart=apart
        )
        self._exits.callback(owner.end)
        return owner

    def owner_apart(self, namespace: str, num_pages: int, page_bytes: int) -> FarOwner:
        """An owner of nixl in another "ipc" or "pid" namespace, as in another container. Skips
        the test where this machine makes none."""
        owner = self.far_owner("nixl", num_pages, page_bytes, namespace)
        assert owner.remote
        return owner

    def memory(self, backend: TransferBackend, num_pages: int, page_bytes: int) -> Memory:
        """For a reader of that backend. It lives until the test has ended."""
        memory = make_memory(backend.name, num_pages, page_bytes)
        self._memories.append(memory)
        return memory

    def far_reader(self, backend: str, num_pages: int, page_bytes: int) -> FarReader:
        reader = FarReader(backend, num_pages, page_bytes, log=self.log)
        self._exits.callback(reader.child.kill)
        return reader

    def connect(
        self,
        backend: TransferBackend,
        owner: FarOwner | NearOwner,
        memory: Memory,
        reader: int = READER,
        moves: Moves | None = None,
    ) -> BackendConnection:
        """A connection that is closed at the end of the test."""
        connection = backend.connect(owner.admit(reader), owner.remote, memory.pool, moves)
        self._memories.append(memory)
        self._exits.enter_context(closing(connection))
        return connection
