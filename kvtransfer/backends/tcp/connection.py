"""The consumer's end of the tcp backend: sends page ids and receives raw pages into the pool.

No more bytes arrive after `stop` (which shuts the socket down) and the user thread's return from
`copy`. Closing the socket would not be enough, because a blocked receive could still store bytes
that the kernel already has. Therefore only the user thread calls `close`, which then waits for
device copies out of the staging memory.
"""

import hmac
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from common.errors import EngineFault, TransferError
from kvtransfer.backends.base import (
    CONNECT_S,
    Ints,
    PageCut,
    PagePart,
    PagePool,
    PoolRegion,
    ReadMap,
    ReadRefused,
)
from kvtransfer.backends.device_memory import DeviceFailure
from kvtransfer.backends.scatter import receive_before
from kvtransfer.backends.scratch import measure
from kvtransfer.backends.tcp.channel import PlainTcpChannel, TcpChannel
from kvtransfer.backends.tcp.memory import TcpMemory
from kvtransfer.backends.tcp.tls import consumer_channel
from kvtransfer.backends.tcp.wire import (
    INTRODUCTION,
    KEY_BYTES,
    MAGIC,
    REPLY,
    REQUEST,
    FrameKind,
    FrameStatus,
    TcpDescription,
    TcpProofs,
    max_request_pages,
    set_options,
)

_REQUESTS_AHEAD = 4
# A byte range, its source pages, its destination pages.
_Read: TypeAlias = tuple[PagePart, Ints, Ints]


class TcpConnection:
    """A consumer's connection: one socket to one producer process."""

    path = "tcp"

    def __init__(
        self,
        description: TcpDescription,
        remote: PoolRegion,
        pool: PagePool,
        memory: TcpMemory,
        reads: ReadMap,
    ) -> None:
        """Connect within CONNECT_S seconds. Raises TransferError if that fails."""
        self._peer = f"{description.host}:{description.port}"
        self._map = reads
        # Probes read as much of a page as both sides have.
        self._scratch = PagePart(0, 0, min(remote.page_bytes, pool.page_bytes))
        self._arrivals = memory.arrivals()
        self._scratch_pages = min(description.scratch_pages, memory.scratch_pages)
        self._memory = memory  # keeps its scratch pages alive
        self._lock = threading.Lock()
        self._stopped = False
        try:
            self._channel = _connect(description)
        except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
            raise TransferError(f"tcp to {self._peer}: {error}") from None

    def probe(self) -> float:
        return measure(
            self._scratch_pages,
            self._scratch.size,
            lambda pages: self._read(FrameKind.SCRATCH, [(self._scratch, pages, pages)]),
        )

    def copy(self, source_pages: Ints, destination_pages: Ints, table: int = 0) -> None:
        reads = self._map.reads(source_pages, destination_pages, table)
        self._read(
            FrameKind.POOL, [(self._map.parts[part], there, here) for part, there, here in reads]
        )

    def stop(self) -> None:
        with self._lock:  # otherwise the descriptor may already belong to another file
            self._stopped = True
            self._channel.end()

    def close(self) -> None:
        with self._lock:
            self._stopped = True
            self._channel.close()
        try:
            self._arrivals.settle()
        except DeviceFailure as error:
            raise EngineFault(
                f"a read from {self._peer} may still write to the pool: {error}"
            ) from None

    def _read(self, kind: FrameKind, reads: Iterable[_Read]) -> None:
        try:
            refused = self._exchange(kind, self._requests(reads))
            self._arrivals.settle()
        except (OSError, TransferError) as error:
            self.stop()  # the start of the next frame is unknown
            raise TransferError(f"tcp from {self._peer}: {error}") from None
        if refused is not None:
            raise ReadRefused(f"the producer does not publish page {refused} to this consumer")

    def _requests(self, reads: Iterable[_Read]) -> list[_Read]:
        """Split reads into requests of at most `request_bytes`."""
        requests = []
        for part, source, destination in reads:
            room = self._arrivals.request_bytes // part.size
            num_pages = min(max(1, room), max_request_pages(part.size))
            for start in range(0, len(source), num_pages):
                end = start + num_pages
                requests.append((part, source[start:end], destination[start:end]))
        return requests

    def _exchange(self, kind: FrameKind, requests: Sequence[_Read]) -> int | None:
        """Send all requests, a few ahead of the replies, and receive every reply. Returns the first
        page that the producer refused, or None.
        """
        num_asked = 0
        refused = None
        for num_answered, (part, _, destination) in enumerate(requests):
            ahead = min(num_answered + _REQUESTS_AHEAD, len(requests))
            while refused is None and num_asked < ahead:
                self._ask(kind, *requests[num_asked][:2])
                num_asked += 1
            if num_answered == num_asked:
                break
            answer = self._receive(kind, PageCut(part.at, part.size), destination)
            refused = answer if refused is None else refused
        return refused

    def _ask(self, kind: FrameKind, part: PagePart, pages: Ints) -> None:
        ids = pages.astype("<i4", copy=False).tobytes()
        self._channel.send(REQUEST.pack(kind, len(pages), part.source, part.size) + ids)

    def _receive(self, kind: FrameKind, cut: PageCut, pages: Ints) -> int | None:
        """Receive the next reply into these pages, or return the page that was refused."""
        if self._stopped:
            raise TransferError("stopped")
        head = bytearray(REPLY.size)
        num_bytes = len(head) + len(pages) * cut.size
        self._channel.receive_vectors(self._arrivals.vectors(pages, head, kind, cut), num_bytes)
        status, refused = REPLY.unpack(head)
        match status:
            case FrameStatus.DATA:
                self._arrivals.landed(pages, kind, cut)
                return None
            case FrameStatus.REFUSED:
                return int(refused)
            case _:
                raise TransferError(f"a response with status {status}")


def _connect(description: TcpDescription) -> TcpChannel:
    """Open an authenticated connection. Raises OSError (also TimeoutError) or TransferError."""
    late = time.monotonic() + CONNECT_S
    connection = socket.create_connection((description.host, description.port), CONNECT_S)
    try:
        proofs = _introduce(connection, description, late)
        connection.settimeout(None)
        channel = (
            consumer_channel(connection, description.certificate)
            if description.certificate
            else PlainTcpChannel(connection)
        )
    except BaseException:
        connection.close()
        raise
    try:
        channel.start(proofs.seal, max(late - time.monotonic(), 1e-3))
    except BaseException:
        channel.close()
        raise
    return channel


def _introduce(connection: socket.socket, description: TcpDescription, late: float) -> TcpProofs:
    """Authenticate both ends to each other."""
    set_options(connection)
    count = time.monotonic_ns()  # ranks of one consumer connect in any order
    proofs = TcpProofs.by(description.key, count)
    connection.sendall(INTRODUCTION.pack(MAGIC, description.consumer, count, proofs.of_consumer))
    answer = receive_before(connection, KEY_BYTES, late)
    if not hmac.compare_digest(answer, proofs.of_producer):
        raise TransferError("a process other than the producer listens there")
    return proofs
