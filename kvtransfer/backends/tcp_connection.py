"""The reader's end of the tcp backend: page ids up, raw pages down, straight into the pool.

The fence is `stop` (shutdown of the socket) plus the user thread out of `copy`: closing alone
lets a blocked receive land what the kernel has already, so `close` belongs to the user thread.
"""

import contextlib
import hmac
import os
import socket
import threading
import time

from common.errors import TransferError
from kvtransfer.backends.base import (
    CONNECT_S,
    Ints,
    PagePool,
    ReadRefused,
    RemotePool,
    check_pages,
    check_pool,
)
from kvtransfer.backends.scatter import (
    PageTable,
    receive_before,
    receive_vectors,
)
from kvtransfer.backends.scratch import Scratch, measure
from kvtransfer.backends.tcp_wire import (
    GREETING,
    INTRODUCTION,
    KEY_BYTES,
    MAGIC,
    MAX_REQUEST_PAGES,
    NONCE_BYTES,
    REPLY,
    REQUEST,
    Description,
    Kind,
    Status,
    owner_proof,
    reader_proof,
    set_options,
)

_REQUEST_BYTES = 1 << 20
_REQUESTS_AHEAD = 4


class TcpConnection:
    """One socket to one owner process."""

    path = "tcp"

    def __init__(
        self, description: Description, remote: RemotePool, pool: PagePool, instance: int
    ) -> None:
        """Blocks for CONNECT_S at most. Raises TransferError where that owner is not there."""
        check_pool(remote, pool)
        self._peer = f"{description.host}:{description.port}"
        self._num_source = remote.num_pages
        self._pool = pool
        self._scratch = Scratch(pool.page_bytes)
        self._table = PageTable(pool)
        self._scratch_table = PageTable(self._scratch.pool)
        self._scratch_pages = min(description.scratch_pages, self._scratch.pool.num_pages)
        self._pages_per_request = min(MAX_REQUEST_PAGES, max(1, _REQUEST_BYTES // pool.page_bytes))
        self._lock = threading.Lock()
        self._stopped = False
        try:
            self._socket = _connect(description, instance)
        except OSError as error:
            raise TransferError(f"tcp to {self._peer}: {error}") from None

    def probe(self) -> float:
        scratch = self._scratch.pool
        return measure(
            self._scratch_pages,
            scratch.page_bytes,
            lambda pages: self._read(Kind.SCRATCH, pages, pages, self._scratch_table),
        )

    def copy(self, source_pages: Ints, destination_pages: Ints) -> None:
        check_pages(source_pages, self._num_source, destination_pages, self._pool.num_pages)
        self._read(Kind.POOL, source_pages, destination_pages, self._table)

    def stop(self) -> None:
        with self._lock:  # or the descriptor may be another file's by now
            self._stopped = True
            with contextlib.suppress(OSError):  # the owner may have gone first, or we closed
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            self._stopped = True
            self._socket.close()

    def _read(self, kind: Kind, source: Ints, destination: Ints, table: PageTable) -> None:
        try:
            refused = self._exchange(kind, source, destination, table)
        except (OSError, TransferError) as error:
            self.stop()  # where the next frame begins is unknown now
            raise TransferError(f"tcp from {self._peer}: {error}") from None
        if refused is not None:
            raise ReadRefused(f"the owner does not publish page {refused} to this reader")

    def _exchange(
        self, kind: Kind, source: Ints, destination: Ints, table: PageTable
    ) -> int | None:
        """Asks for all pages, a few requests ahead of the answers. Returns the first page that
        was refused; no answer is outstanding then."""
        starts = range(0, len(source), self._pages_per_request)
        num_asked = 0
        refused = None
        for num_answered, start in enumerate(starts):
            while refused is None and num_asked < min(num_answered + _REQUESTS_AHEAD, len(starts)):
                self._ask(kind, source[starts[num_asked] :][: self._pages_per_request])
                num_asked += 1
            if num_answered == num_asked:
                break
            answer = self._receive(table, destination[start : start + self._pages_per_request])
            refused = answer if refused is None else refused
        return refused

    def _ask(self, kind: Kind, pages: Ints) -> None:
        ids = pages.astype("<i4", copy=False).tobytes()
        self._socket.sendall(REQUEST.pack(kind, len(pages)) + ids)

    def _receive(self, table: PageTable, pages: Ints) -> int | None:
        """Lands the next answer in these pages, or returns the page that was refused."""
        if self._stopped:
            raise TransferError("stopped")
        head = bytearray(REPLY.size)
        num_bytes = len(head) + len(pages) * self._pool.page_bytes
        receive_vectors(self._socket, table.vectors(pages, head), num_bytes)
        status, refused = REPLY.unpack(head)
        match status:
            case Status.DATA:
                return None
            case Status.REFUSED:
                return int(refused)
            case _:
                raise TransferError(f"an answer of status {status}")


def _connect(description: Description, instance: int) -> socket.socket:
    """A proved connection. Raises OSError (TimeoutError too) or TransferError."""
    deadline = time.monotonic() + CONNECT_S
    connection = socket.create_connection((description.host, description.port), CONNECT_S)
    try:
        set_options(connection)
        magic, challenge = GREETING.unpack(receive_before(connection, GREETING.size, deadline))
        if magic != MAGIC:
            raise TransferError("no owner of ours listens there")
        nonce = os.urandom(NONCE_BYTES)
        proof = reader_proof(description.key, challenge, nonce)
        connection.sendall(INTRODUCTION.pack(instance, nonce, proof))
        answer = receive_before(connection, KEY_BYTES, deadline)
        if not hmac.compare_digest(answer, owner_proof(description.key, challenge, nonce)):
            raise TransferError("another process than that owner listens there")
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection
