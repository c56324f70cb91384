"""Producers and consumers for tests of the data paths. `Ends` makes and closes them all.

Far ones run in another process. Near ones, of loopback, run in this process.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from common.errors import TransferError
from kvtransfer.backends.base import (
    BackendConnection,
    Ints,
    PoolRegion,
    TableSlices,
    TransferBackend,
)
from kvtransfer.backends.path_proof import prove_same_host
from kvtransfer.backends.tcp.wire import INTRODUCTION, KEY_BYTES, MAGIC, TcpDescription, TcpProofs
from tests.support.network.data_children import (
    CANARY,
    CONSUMER,
    REPLY_S,
    Child,
    Memory,
    NearProducer,
    consumer_program,
    content,
    make_memory,
    nonce_program,
    producer_program,
    scattered,
)


def wait_for(condition: Callable[[], bool], timeout_s: float = REPLY_S) -> None:
    """Wait for an effect of another thread or process that sends no notification."""
    late = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < late, "it does not come about"
        time.sleep(0.0005)


def introduction(to: TcpDescription) -> bytes:
    """Return the first message of a consumer on a new connection."""
    count = time.monotonic_ns()
    proofs = TcpProofs.by(to.key, count)
    return INTRODUCTION.pack(MAGIC, to.consumer, count, proofs.of_consumer)


def introduced(description: bytes) -> socket.socket:
    """Return a raw, authenticated connection to a tcp producer."""
    producer = msgspec.msgpack.decode(description, type=TcpDescription)
    raw = socket.create_connection((producer.host, producer.port), 5)
    raw.settimeout(None)
    raw.sendall(introduction(producer))
    assert len(raw.recv(KEY_BYTES, socket.MSG_WAITALL)) == KEY_BYTES
    return raw


def changed(description: TcpDescription, **fields: object) -> bytes:
    """Return the description of a tcp producer with some fields changed."""
    return msgspec.msgpack.encode(msgspec.structs.replace(description, **fields))


class FarProducer:
    """A NearProducer in another process."""

    def __init__(
        self, backend: str, num_pages: int, page_bytes: int, *, seed: int, log: Path, apart: str
    ) -> None:
        self.content = content(seed, num_pages, page_bytes)
        self.child = Child(
            producer_program,
            apart,
            backend,
            num_pages,
            page_bytes,
            seed,
            log=log,
            on_gpu=backend.endswith("-cuda"),
        )
        self._remote: PoolRegion | None = None

    @property
    def remote(self) -> PoolRegion:
        """Wait until the producer serves. Skips the test without its path on this machine."""
        if self._remote is None:
            described = self.child.receive()
            if isinstance(described, str):
                pytest.skip(f"no namespace can be made: {described}")
            self._remote = described
        return self._remote

    def admit(self, consumer: int = CONSUMER) -> bytes:
        assert self.remote
        description: bytes = self.child.ask("admit", consumer)
        return description

    def dismiss(self, consumer: int = CONSUMER) -> None:
        self.child.ask("dismiss", consumer)

    def publish(self, consumer: int, pages: Ints) -> None:
        assert self.remote
        self.child.ask("publish", consumer, pages)

    def withdraw(self, consumer: int, pages: Ints) -> None:
        self.child.ask("withdraw", consumer, pages)

    def publish_all(self, consumer: int = CONSUMER) -> None:
        assert self.remote
        self.child.ask("publish_all", consumer)

    def has_run(self) -> None:
        """Wait until the producer's loop has run once more."""
        self.child.ask("poll")

    def end(self) -> None:
        """Kill the process without a graceful shutdown."""
        self.child.kill()


class FarConsumer:
    """A process that reads all pages of a producer repeatedly and reports errors."""

    def __init__(self, backend: str, num_pages: int, page_bytes: int, *, log: Path) -> None:
        self.child = Child(
            consumer_program,
            backend,
            num_pages,
            page_bytes,
            log=log,
            on_gpu=backend.endswith("-cuda"),
        )
        assert self.child.receive() == "started"

    def read_from(self, producer: FarProducer) -> None:
        """Start to read, and return once the first copy has landed with correct bytes."""
        landed = self.child.ask(producer.admit(), producer.remote, producer.content)
        assert landed == "landed", landed

    def failed(self) -> None:
        """Wait until reading has ended with an error."""
        self.child.receive()


def one_sided_refusal(log: Path) -> str:
    """Return why this machine's processes may not read each other's memory, or ""."""
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
    """Stop and close a BackendConnection at the end, whatever its state."""
    try:
        yield connection
    finally:
        connection.stop()
        connection.close()


@contextmanager
def long_copy(connection: BackendConnection, memory: Memory, num_pages: int) -> Iterator[None]:
    """Run the body while pages are copied 4,000 times, which takes seconds on any path. The body
    must end the copy.
    """
    source, destination = (np.tile(ids, 4000) for ids in scattered(0, num_pages, num_pages))
    ended = threading.Event()

    def copy() -> None:
        with pytest.raises(TransferError):
            connection.copy(source, destination)
        ended.set()

    thread = threading.Thread(target=copy)
    thread.start()
    wait_for(lambda: bool((memory.pages[destination[:8]] != CANARY).any()))
    yield
    assert ended.wait(60.0)
    thread.join()


class Ends:
    """Makes producers and consumers, and ends them all."""

    def __init__(self, log: Path, exits: ExitStack) -> None:
        self.log = log
        self._exits = exits
        self._num_producers = 0
        self._memories: list[Memory] = []  # must outlive their connections

    def producer(
        self, backend: TransferBackend, num_pages: int, page_bytes: int
    ) -> FarProducer | NearProducer:
        """Make a producer in another process, or for loopback in this one."""
        if backend.name == "loopback":
            self._num_producers += 1
            near = NearProducer(backend, num_pages, page_bytes, seed=self._num_producers)
            self._exits.callback(near.end)
            return near
        return self.far_producer(backend.name, num_pages, page_bytes)

    def far_producer(
        self, backend: str, num_pages: int, page_bytes: int, apart: str = ""
    ) -> FarProducer:
        """Make a producer in another process. `apart`: "ipc" or "pid": its own namespace."""
        self._num_producers += 1
        producer = FarProducer(
            backend, num_pages, page_bytes, seed=self._num_producers, log=self.log, apart=apart
        )
        self._exits.callback(producer.end)
        return producer

    def producer_apart(self, namespace: str, num_pages: int, page_bytes: int) -> FarProducer:
        """Make a nixl producer in its own "ipc" or "pid" namespace, as in another container.

        Skips the test if this machine does not allow it.
        """
        producer = self.far_producer("nixl", num_pages, page_bytes, namespace)
        assert producer.remote
        return producer

    def memory(self, backend: TransferBackend, num_pages: int, page_bytes: int) -> Memory:
        """Allocate memory for a consumer of that backend. It lives until the end of the test."""
        memory = make_memory(backend.name, num_pages, page_bytes)
        self._memories.append(memory)
        return memory

    def far_consumer(self, backend: str, num_pages: int, page_bytes: int) -> FarConsumer:
        consumer = FarConsumer(backend, num_pages, page_bytes, log=self.log)
        self._exits.callback(consumer.child.kill)
        return consumer

    def connect(
        self,
        backend: TransferBackend,
        producer: FarProducer | NearProducer,
        memory: Memory,
        consumer: int = CONSUMER,
        slices: TableSlices | None = None,
    ) -> BackendConnection:
        """Open a connection that is closed at the end of the test."""
        connection = backend.connect(producer.admit(consumer), producer.remote, memory.pool, slices)
        self._memories.append(memory)
        self._exits.enter_context(closing(connection))
        return connection
