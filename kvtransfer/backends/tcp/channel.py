"""Byte transfer over a data connection whose ends are authenticated. Plain here, TLS in tls.py.

Knows sockets and addresses of memory, neither frames nor consumers.
"""

import contextlib
import select
import socket
from typing import Protocol

from common.errors import TransferError
from kvtransfer.backends.scatter import Vectors, receive_vectors, send_vectors


class TcpChannel(Protocol):
    """One end of an authenticated data connection. For one thread, except `end`. Every method but
    `end` and `close` raises OSError if the connection is gone, and TransferError if the other end
    has closed it.
    """

    def start(self, seal: bytes, timeout_s: float) -> None:
        """Start the channel. Called first. `seal` is known to both ends and to no other process.

        Raises:
            TransferError: the other end is not authentic, or does not support this kind of channel.
        """
        ...

    def send(self, data: bytes) -> None: ...

    def send_vectors(self, vectors: Vectors, num_bytes: int) -> None:
        """Send all num_bytes of the vectors."""
        ...

    def receive(self, num_bytes: int) -> bytes: ...

    def receive_vectors(self, vectors: Vectors, num_bytes: int) -> None:
        """Fill all num_bytes of the vectors."""
        ...

    def has_input(self) -> bool:
        """Return whether there is something to receive, including the end of the stream."""
        ...

    def end(self) -> None:
        """Make a call in progress, and every later one, raise soon. Any thread, but not while
        `close` runs. Never blocks.
        """
        ...

    def close(self) -> None:
        """Close the channel. After it returns no byte lands. Outside every other call.
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
    """End both directions. Does not call the method of the socket's own class: for a TLS socket
    that would continue in plain text, and land encrypted bytes as if they were plain.
    """
    with contextlib.suppress(OSError):  # the other end may have closed it first
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
