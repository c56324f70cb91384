"""How bytes cross a data connection whose ends have proved who they are: here as they are, in TLS
in tls.py.

Knows sockets and addresses of memory, neither frames nor readers.
"""

import contextlib
import select
import socket
from typing import Protocol

from common.errors import TransferError
from kvtransfer.backends.scatter import Vectors, receive_vectors, send_vectors


class Channel(Protocol):
    """For one thread, but for `end`. Every method but `end` and `close` raises OSError where the
    connection is gone, and TransferError where the other end has ended it."""

    def start(self, seal: bytes, timeout_s: float) -> None:
        """Called first. `seal` is what both ends know and nobody else.

        Raises:
            TransferError: the other end is not who it said, or cannot speak as this one does.
        """
        ...

    def send(self, data: bytes) -> None: ...

    def send_vectors(self, vectors: Vectors, num_bytes: int) -> None:
        """All num_bytes of it."""
        ...

    def receive(self, num_bytes: int) -> bytes: ...

    def receive_vectors(self, vectors: Vectors, num_bytes: int) -> None:
        """Fills all num_bytes of it."""
        ...

    def has_input(self) -> bool:
        """Whether there is something to receive, were it the end."""
        ...

    def end(self) -> None:
        """Makes a call under way, and every later one, raise soon. Any thread, but not while
        `close` runs; never blocks."""
        ...

    def close(self) -> None:
        """After it returns no byte lands. Outside every other call; idempotent."""
        ...


class PlainChannel:
    """As they are."""

    def __init__(self, connection: socket.socket) -> None:
        """Owns the connection."""
        self._socket = connection

    def start(self, seal: bytes, timeout_s: float) -> None:
        self._socket.settimeout(None)  # the readers and writers of scatter.py need a blocking one

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
    """Ends both directions. Not by the method of its class: that of a socket in TLS would go on as
    one without, and land what is encrypted as if it were plain."""
    with contextlib.suppress(OSError):  # the other end may have gone first
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
