"""The producer's end of the tcp backend: serves pages on its own threads.

One thread accepts connections and holds them until they authenticate. An unauthenticated connection
costs one descriptor for two seconds, and never a thread or a TLS handshake. Consumers authenticate
immediately, so they rarely wait here. At the limit, the oldest connection of the host with the most
waiting connections is closed, so a flood of silent connections does not displace consumers.

One thread per connection answers its requests in order. It serves only pages published to that
consumer. A consumer that requests other pages, or sends invalid data, breaks only its own
connection. Dismissing a consumer ends its connections (consumers.py).
"""

import logging
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np

from common.errors import EngineFault, ProtocolViolation, ServingError, TransferError
from common.logs import ThrottledLog
from kvtransfer.backends.base import (
    CONNECT_S,
    PageCut,
    PagePool,
    PublishedPages,
    first_outside,
    prepared,
)
from kvtransfer.backends.device_memory import DeviceFailure
from kvtransfer.backends.tcp.channel import PlainTcpChannel, TcpChannel
from kvtransfer.backends.tcp.consumers import TcpConsumers
from kvtransfer.backends.tcp.memory import Load, SendBuffers, TcpMemory
from kvtransfer.backends.tcp.tls import ProducerTls
from kvtransfer.backends.tcp.wire import (
    INTRODUCTION,
    MAGIC,
    REPLY,
    REQUEST,
    FrameKind,
    FrameStatus,
    TcpDescription,
    max_request_pages,
    set_options,
)

_PATIENCE_S = 2.0
_MAX_PENDING = 256
_BACKLOG = 512
_OUT_OF_DESCRIPTORS_S = 0.05
_END_S = 5.0
_log = ThrottledLog(logging.getLogger(__name__))
# Args: a blocking connection, owned by the callee. The peer's host. Its introduction.
Admit: TypeAlias = Callable[[socket.socket, str, bytes], None]


@dataclass(slots=True)
class _Pending:
    host: str
    late: float  # by time.monotonic()
    said: bytes = b""


class TcpAcceptor:
    """Listens on `port` of `host` (0: any free port) until `shut`, and passes on connections that
    have introduced themselves.
    """

    def __init__(
        self, host: str, port: int, admit: Admit, *, patience_s: float = _PATIENCE_S
    ) -> None:
        """Bind the port.

        Args:
            admit: called on the acceptor's thread with each connection that has introduced itself.
                Raises ServingError or OSError to reject it. Must not block.
            patience_s: seconds that a connection may take to introduce itself.
        Raises:
            TransferError: the host or the port cannot be bound.
        """
        self._admit = admit
        self._patience_s = patience_s
        self._shut = False
        self._pending: dict[socket.socket, _Pending] = {}  # oldest first
        self._listener = _listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="tcp-acceptor", daemon=True)
        self._thread.start()

    def shut(self) -> None:
        """Stop accepting connections. Idempotent."""
        if self._shut:
            return
        self._shut = True
        self._listener.shutdown(socket.SHUT_RDWR)  # ends the thread's sleep
        self._thread.join(_END_S)
        if self._thread.is_alive():
            raise EngineFault("the acceptor thread of a tcp producer does not stop")
        self._listener.close()  # only here: the thread may end before the shutdown above

    # On the acceptor's thread

    def _run(self) -> None:
        while not self._shut:
            for key, _ in self._selector.select(self._longest_sleep_s()):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._hear(key.fileobj)  # type: ignore[arg-type]
            self._disconnect_late()
        for connection in self._pending:
            connection.close()
        self._selector.close()

    def _longest_sleep_s(self) -> float | None:
        for pending in self._pending.values():
            return max(0.0, pending.late - time.monotonic())
        return None

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except BlockingIOError:
            return  # the peer has already closed it
        except OSError as error:
            if not self._shut:
                # The peer closed it while it was in the backlog, or no descriptors are free now.
                _log.warning("data connection not accepted", reason=error)
                time.sleep(_OUT_OF_DESCRIPTORS_S)
            return
        if len(self._pending) >= _MAX_PENDING:
            self._disconnect(
                self._longest_of_the_crowd(), f"{_MAX_PENDING} other connections are pending"
            )
        connection.setblocking(False)
        late = time.monotonic() + self._patience_s
        self._pending[connection] = _Pending(address[0], late)
        self._selector.register(connection, selectors.EVENT_READ)
        self._hear(connection)

    def _hear(self, connection: socket.socket) -> None:
        pending = self._pending.get(connection)
        if pending is None:
            return  # removed in the meantime
        try:
            heard = connection.recv(INTRODUCTION.size - len(pending.said))
        except BlockingIOError:
            return  # nothing received yet
        except OSError:
            heard = b""
        pending.said += heard
        if not heard:
            self._forget(connection)
            connection.close()
        elif len(pending.said) == INTRODUCTION.size:
            self._forget(connection)
            try:
                connection.setblocking(True)
                self._admit(connection, pending.host, pending.said)
            except (ServingError, OSError) as error:
                _log_rejected(pending, str(error))
                connection.close()

    def _disconnect_late(self) -> None:
        now = time.monotonic()
        late = [each for each, pending in self._pending.items() if pending.late <= now]
        for connection in late:
            self._disconnect(connection, f"no introduction within {self._patience_s:g} s")

    def _longest_of_the_crowd(self) -> socket.socket:
        hosts = Counter(pending.host for pending in self._pending.values())
        ((crowded, _),) = hosts.most_common(1)
        return next(each for each, other in self._pending.items() if other.host == crowded)

    def _disconnect(self, connection: socket.socket, reason: str) -> None:
        _log_rejected(self._forget(connection), reason)
        connection.close()

    def _forget(self, connection: socket.socket) -> _Pending:
        self._selector.unregister(connection)
        return self._pending.pop(connection)


def _log_rejected(pending: _Pending, reason: str) -> None:
    _log.warning("data connection rejected", peer=pending.host, reason=reason)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise TransferError(f"tcp cannot listen on {host}, port {port}: {error}") from None
    listener.setblocking(False)
    return listener


_HANDSHAKE_S = 2.0


@dataclass(frozen=True, slots=True)
class _Answer:
    """A reply whose load has started and that is not sent yet."""

    head: bytearray
    load: Load
    num_bytes: int  # of head and pages


class TcpProducer:
    """The tcp producer. Listens on `port` of `host` (0: any free port) until closed."""

    def __init__(
        self, host: str, port: int, pool: PagePool, memory: TcpMemory, tls: ProducerTls | None
    ) -> None:
        """Raises TransferError if the host or the port cannot be bound."""
        self._host = host
        self._pool = pool
        self._memory = memory
        self._tls = tls
        self.publications = PublishedPages(pool.num_pages)
        self._consumers = TcpConsumers()
        self._acceptor = TcpAcceptor(host, port, self._admit)
        _log.info(
            "tcp data path listening",
            host=host,
            port=self._acceptor.port,
            encrypted=tls is not None,
        )

    def prepare(self, consumer: int) -> Future[Any]:
        return prepared()

    def admit(self, consumer: int) -> bytes:
        return msgspec.msgpack.encode(
            TcpDescription(
                host=self._host,
                port=self._acceptor.port,
                consumer=consumer,
                key=self._consumers.admit(consumer),
                certificate=self._tls.certificate if self._tls else b"",
                scratch_pages=self._memory.scratch_pages,
            )
        )

    def dismiss(self, consumer: int) -> None:
        self._consumers.dismiss(consumer)
        self.publications.forget(consumer)

    def poll(self) -> None:
        """No-op: the producer's own threads serve consumers."""

    def close(self) -> None:
        self._acceptor.shut()
        for thread in self._consumers.end_all():
            thread.join(CONNECT_S)
            if thread.is_alive():
                raise EngineFault(
                    "a thread of a tcp producer does not stop, so its pool is still in use"
                )

    # On the acceptor's thread

    def _admit(self, connection: socket.socket, host: str, introduction: bytes) -> None:
        """Authenticate a new connection, and serve it on a thread of its own."""
        magic, consumer, count, proof = INTRODUCTION.unpack(introduction)
        if magic != MAGIC:
            raise ProtocolViolation("it does not use the protocol of consumers")
        proofs = self._consumers.proved(consumer, count, proof)
        set_options(connection)
        connection.send(proofs.of_producer)  # never blocks: these are the first bytes sent
        channel = self._tls.channel(connection) if self._tls else PlainTcpChannel(connection)
        thread = threading.Thread(
            target=self._serve,
            args=(channel, consumer, host, proofs.seal),
            name="tcp-producer",
            daemon=True,
        )
        try:
            self._consumers.enter(consumer, channel, thread)
        except ServingError:
            channel.close()
            raise

    # On a thread of the connection

    def _serve(self, channel: TcpChannel, consumer: int, host: str, seal: bytes) -> None:
        try:
            self._start(channel, seal)
            with closing(self._memory.departures()) as departures:
                self._answer_all(channel, consumer, departures)
        except (ProtocolViolation, DeviceFailure) as error:
            _log.warning("data connection closed", peer=host, reason=error)
        except (OSError, TransferError):
            pass  # the consumer has disconnected
        finally:
            self._consumers.leave(consumer, channel)

    def _start(self, channel: TcpChannel, seal: bytes) -> None:
        try:
            channel.start(seal, _HANDSHAKE_S)
        except TransferError as error:
            raise ProtocolViolation(str(error)) from None

    def _answer_all(self, channel: TcpChannel, consumer: int, departures: SendBuffers) -> None:
        """Answer requests until the consumer disconnects. Loads the next reply while one is sent,
        if pages are staged and the consumer has sent another request.
        """
        answers = deque([self._begin(channel, consumer, departures)])
        while True:
            answer = answers.popleft()
            vectors = answer.load(answer.head)
            while len(answers) < departures.num_ahead and channel.has_input():
                answers.append(self._begin(channel, consumer, departures))
            channel.send_vectors(vectors, answer.num_bytes)
            if not answers:
                answers.append(self._begin(channel, consumer, departures))

    def _begin(self, channel: TcpChannel, consumer: int, departures: SendBuffers) -> _Answer:
        """Receive one request and start its reply, with the pages, or zeros if a page is
        refused.
        """
        kind, num_pages, at, size = REQUEST.unpack(channel.receive(REQUEST.size))
        if not 1 <= size <= at + size <= self._pool.page_bytes:
            raise ProtocolViolation(f"a request for {size} bytes at offset {at} of pages")
        if not 1 <= num_pages <= max_request_pages(size):
            raise ProtocolViolation(f"a request for {num_pages} pages")
        cut = PageCut(at, size)
        pages = np.frombuffer(channel.receive(4 * num_pages), np.int32)
        match kind:
            case FrameKind.POOL:
                refused = self.publications.first_refused(consumer, pages)
            case FrameKind.SCRATCH:
                refused = first_outside(pages, self._memory.scratch_pages)
            case _:
                raise ProtocolViolation(f"a request of kind {kind}")
        head = bytearray(REPLY.size)
        if refused is None:
            REPLY.pack_into(head, 0, FrameStatus.DATA, 0)
            load = departures.begin(kind, pages, cut)
        else:
            REPLY.pack_into(head, 0, FrameStatus.REFUSED, refused)
            load = departures.begin(FrameKind.SCRATCH, np.zeros_like(pages), cut)
        return _Answer(head, load, len(head) + num_pages * size)
