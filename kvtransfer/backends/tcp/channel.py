"""Byte transfer over an authenticated data connection: the interface, and its plain-text
implementation. tls.py has the encrypted one.
"""

import contextlib
import select
import socket
from typing import Protocol

from common.errors import TransferError
from kvtransfer.backends.scatter import Vectors, receive_vectors, send_vectors


class TcpChannel(Protocol):
    """One end of an authenticated data connection. One thread uses it, except for `end`. Every
    method but `end` and `close` raises OSError if the connection has failed, and TransferError if
    the peer has closed it.
    """

    def start(self, seal: bytes, timeout_s: float) -> None:
        """Start the channel, before any other call. `seal` is known only to the two ends.

        Raises:
            TransferError: the peer is not authentic, or does not support this kind of channel.
        """
        ...

    def send(self, data: bytes) -> None: ...

    def send_vectors(self, vectors: Vectors, num_bytes: int) -> None: ...

    def receive(self, num_bytes: int) -> bytes: ...

    def receive_vectors(self, vectors: Vectors, num_bytes: int) -> None: ...

    def has_input(self) -> bool:
        """Return whether data, or the end of the stream, can be received."""
        ...

    def end(self) -> None:
        """Make a call in progress, and every later one, raise soon. Never blocks. Any thread may
        call it, but not during `close`.
        """
        ...

    def close(self) -> None:
        """Close the channel. Afterwards no more bytes arrive. Only outside other calls.
        Idempotent.
        """
        ...


class PlainTcpChannel:
    """A channel without encryption."""

    def __init__(self, connection: socket.socket) -> None:
        """Take ownership of the connection."""
        self._socket = connection

    def start(self, seal: bytes, timeout_s: float) -> None:
        self._socket.settimeout(None)  # scatter.py needs a blocking socket

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def send_vectors(self, vectors: Vectors, num_bytes: int) -> None:
        send_vectors(self._socket, vectors, num_bytes)

    def receive(self, num_bytes: int) -> bytes:
        received = self._socket.recv(num_bytes, socket.MSG_WAITALL)
        if len(received) < num_bytes:
            raise TransferError("the connection ended")
        return received

    def receive_vectors(self, vectors: Vectors, num_bytes: int) -> None:
        receive_vectors(self._socket, vectors, num_bytes)

    def has_input(self) -> bool:
        return is_readable(self._socket)

    def end(self) -> None:
        end(self._socket)

    def close(self) -> None:
        self._socket.close()


def is_readable(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def end(connection: socket.socket) -> None:
    """Shut down both directions. Bypasses the TLS socket's own `shutdown`, which would continue in
    plain text and store encrypted bytes as if they were plain.
    """
    with contextlib.suppress(OSError):  # the peer may have closed it first
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
