"""The owner's end of the tcp backend: serves pages on threads of its own.

One thread accepts, one thread per reader answers its requests in order. Only pages published to
that reader are served; a reader that asks for others, or lies, harms its own connection alone.
"""

import contextlib
import hmac
import logging
import os
import socket
import threading
import time
from collections import deque
from contextlib import closing
from dataclasses import dataclass

import msgspec
import numpy as np

from common.errors import EngineFault, ProtocolViolation, TransferError
from common.logs import kv
from kvtransfer.backends.base import CONNECT_S, Ints, PagePool, first_outside
from kvtransfer.backends.device_memory import DeviceFailure
from kvtransfer.backends.publications import Publications
from kvtransfer.backends.scatter import receive_before, receive_exactly, send_vectors
from kvtransfer.backends.tcp_memory import Departures, Load, Memory
from kvtransfer.backends.tcp_wire import (
    GREETING,
    INTRODUCTION,
    KEY_BYTES,
    MAGIC,
    NONCE_BYTES,
    REPLY,
    REQUEST,
    Description,
    Kind,
    Status,
    max_request_pages,
    owner_proof,
    reader_key,
    reader_proof,
    set_options,
)

_MAX_CONNECTIONS = 256
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Answer:
    """One that has been begun, and not sent."""

    head: bytearray
    load: Load
    num_bytes: int  # of head and pages


class TcpOwner:
    """Listens on an ephemeral port of `host` until closed."""

    def __init__(self, host: str, pool: PagePool, memory: Memory) -> None:
        """Raises TransferError where the host cannot be bound."""
        self._host = host
        self._pool = pool
        self._memory = memory
        self._max_pages = max_request_pages(pool.page_bytes)
        self._publications = Publications(pool.num_pages)
        self._secret = os.urandom(KEY_BYTES)
        self._lock = threading.Lock()
        self._threads: dict[socket.socket, threading.Thread] = {}
        self._closed = False
        self._listener = _listen(host)
        self._port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name="tcp-accept", daemon=True)
        self._acceptor.start()

    def describe(self, reader: int) -> bytes:
        return msgspec.msgpack.encode(
            Description(
                host=self._host,
                port=self._port,
                key=reader_key(self._secret, reader),
                scratch_pages=self._memory.scratch_pages,
            )
        )

    def publish(self, reader: int, pages: Ints) -> None:
        self._publications.publish(reader, pages)

    def withdraw(self, reader: int, pages: Ints) -> None:
        self._publications.withdraw(reader, pages)

    def poll(self) -> None:
        """Nothing to do: the owner's own threads answer."""

    def close(self) -> None:
        with self._lock:
            self._closed = True
            threads = [self._acceptor, *self._threads.values()]
            for connection in (self._listener, *self._threads):
                with contextlib.suppress(OSError):  # the other end may have gone first
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(CONNECT_S)
            if thread.is_alive():
                raise EngineFault("a tcp owner's thread does not end: its pool is still in use")
        self._listener.close()

    # On the owner's own threads ------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                # A connection that died in the backlog, or no descriptors left for a moment.
                _log.warning("a data connection could not be accepted %s", kv(because=error))
                time.sleep(0.05)
                continue
            with self._lock:
                if self._closed or len(self._threads) >= _MAX_CONNECTIONS:
                    _log.warning("a data connection was turned away %s", kv(peer=address[0]))
                    connection.close()
                    continue
                self._threads[connection] = thread = threading.Thread(
                    target=self._serve, args=(connection, address), name="tcp-owner", daemon=True
                )
                thread.start()

    def _serve(self, connection: socket.socket, address: tuple[str, int]) -> None:
        try:
            reader = self._greet(connection)
            with closing(self._memory.departures()) as departures:
                self._answer_all(connection, reader, departures)
        except (ProtocolViolation, DeviceFailure) as error:
            _log.warning("data connection ended %s", kv(peer=address[0], because=error))
        except (OSError, TransferError):
            pass  # the reader has gone, or never was one
        finally:
            with self._lock:
                del self._threads[connection]
            connection.close()

    def _greet(self, connection: socket.socket) -> int:
        """Proves both ends to each other and returns the reader's instance id."""
        deadline = time.monotonic() + CONNECT_S
        set_options(connection)
        challenge = os.urandom(NONCE_BYTES)
        connection.sendall(GREETING.pack(MAGIC, challenge))
        reader, nonce, proof = INTRODUCTION.unpack(
            receive_before(connection, INTRODUCTION.size, deadline)
        )
        key = reader_key(self._secret, reader)
        if not hmac.compare_digest(proof, reader_proof(key, challenge, nonce)):
            raise ProtocolViolation(f"no proof that it is reader {reader:016x}")
        connection.settimeout(None)  # the readers and writers of scatter.py need a blocking socket
        connection.sendall(owner_proof(key, challenge, nonce))
        return int(reader)

    def _answer_all(self, connection: socket.socket, reader: int, departures: Departures) -> None:
        """Until the reader goes. Begins the next answer before it sends one, where pages have
        somewhere to wait and the reader has asked for more."""
        answers = deque([self._begin(connection, reader, departures)])
        while True:
            answer = answers.popleft()
            vectors = answer.load(answer.head)
            while len(answers) < departures.num_ahead and _asks(connection):
                answers.append(self._begin(connection, reader, departures))
            send_vectors(connection, vectors, answer.num_bytes)
            if not answers:
                answers.append(self._begin(connection, reader, departures))

    def _begin(self, connection: socket.socket, reader: int, departures: Departures) -> _Answer:
        """Takes one request. Its answer brings the pages, or as many zeros where one is refused."""
        kind, num_pages = REQUEST.unpack(receive_exactly(connection, REQUEST.size))
        if not 1 <= num_pages <= self._max_pages:
            raise ProtocolViolation(f"a request for {num_pages} pages")
        pages = np.frombuffer(receive_exactly(connection, 4 * num_pages), np.int32)
        match kind:
            case Kind.POOL:
                refused = self._publications.first_refused(reader, pages)
            case Kind.SCRATCH:
                refused = first_outside(pages, self._memory.scratch_pages)
            case _:
                raise ProtocolViolation(f"a request of kind {kind}")
        head = bytearray(REPLY.size)
        if refused is None:
            REPLY.pack_into(head, 0, Status.DATA, 0)
            load = departures.begin(kind, pages)
        else:
            REPLY.pack_into(head, 0, Status.REFUSED, refused)
            load = departures.begin(Kind.SCRATCH, np.zeros_like(pages))
        return _Answer(head, load, len(head) + num_pages * self._pool.page_bytes)


def _asks(connection: socket.socket) -> bool:
    """Whether there is something to receive, were it the end."""
    try:
        connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    return True


def _listen(host: str) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family, backlog=64)
    except OSError as error:
        raise TransferError(f"tcp cannot listen on {host}: {error}") from None
