"""Accepts connections and holds them until they introduce themselves. One thread, short timeout.

An unauthenticated connection costs one descriptor for two seconds, and never a thread or a
handshake. Readers introduce themselves immediately, so they rarely wait here. At the limit, the
oldest connection of the host with the most waiting connections is closed, so a flood of silent
connections displaces itself.

Knows the size of an introduction, not its content.
"""

import logging
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from common.errors import EngineFault, ServingError, TransferError
from common.logs import Throttle, ThrottledLog
from kvtransfer.backends.tcp.wire import INTRODUCTION

_PATIENCE_S = 2.0
_MAX_STRANGERS = 256
_BACKLOG = 512
_OUT_OF_DESCRIPTORS_S = 0.05
_END_S = 5.0

_log = ThrottledLog(logging.getLogger(__name__), Throttle())

# A connection (blocking, owned by the callee), the host of its other end, its introduction.
LetIn: TypeAlias = Callable[[socket.socket, str, bytes], None]


@dataclass(slots=True)
class _Stranger:
    host: str
    late: float  # by time.monotonic()
    said: bytes = b""


class TcpAcceptor:
    """Listens on `port` of `host` (0: any free one) until it is shut."""

    def __init__(
        self, host: str, port: int, let_in: LetIn, *, patience_s: float = _PATIENCE_S
    ) -> None:
        """
        Args:
            let_in: called on the acceptor's thread with each connection that has introduced itself.
                Raises ServingError or OSError to reject it. Must not block.
            patience_s: seconds that a connection may take to introduce itself.

        Raises:
            TransferError: the host or the port cannot be bound.
        """
        self._let_in = let_in
        self._patience_s = patience_s
        self._shut = False
        self._strangers: dict[socket.socket, _Stranger] = {}  # oldest first
        self._listener = _listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="tcp-door", daemon=True)
        self._thread.start()

    def shut(self) -> None:
        """Stop accepting connections. Idempotent."""
        if self._shut:
            return
        self._shut = True
        self._listener.shutdown(socket.SHUT_RDWR)  # ends the thread's sleep
        self._thread.join(_END_S)
        if self._thread.is_alive():
            raise EngineFault("the thread of a tcp owner's door does not end")
        self._listener.close()  # not by its thread, which may end before the shutdown above

    # On the acceptor's thread --------------------------------------------------------------------

    def _run(self) -> None:
        while not self._shut:
            for key, _ in self._selector.select(self._longest_sleep_s()):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._hear(key.fileobj)  # type: ignore[arg-type]
            self._turn_out_late()
        for connection in self._strangers:
            connection.close()
        self._selector.close()

    def _longest_sleep_s(self) -> float | None:
        for stranger in self._strangers.values():
            return max(0.0, stranger.late - time.monotonic())
        return None

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except BlockingIOError:
            return  # the connection has ended again
        except OSError as error:
            if not self._shut:
                # It ended in the backlog, or no descriptors are left for a moment.
                _log.warning("data connection not accepted", reason=error)
                time.sleep(_OUT_OF_DESCRIPTORS_S)
            return
        if len(self._strangers) >= _MAX_STRANGERS:
            self._turn_out(self._longest_of_the_crowd(), f"{_MAX_STRANGERS} others wait")
        connection.setblocking(False)
        late = time.monotonic() + self._patience_s
        self._strangers[connection] = _Stranger(address[0], late)
        self._selector.register(connection, selectors.EVENT_READ)
        self._hear(connection)

    def _hear(self, connection: socket.socket) -> None:
        stranger = self._strangers.get(connection)
        if stranger is None:
            return  # removed a moment ago
        try:
            heard = connection.recv(INTRODUCTION.size - len(stranger.said))
        except BlockingIOError:
            return  # nothing received yet
        except OSError:
            heard = b""
        stranger.said += heard
        if not heard:
            self._forget(connection)
            connection.close()
        elif len(stranger.said) == INTRODUCTION.size:
            self._forget(connection)
            try:
                connection.setblocking(True)
                self._let_in(connection, stranger.host, stranger.said)
            except (ServingError, OSError) as error:
                _turned_away(stranger, str(error))
                connection.close()

    def _turn_out_late(self) -> None:
        now = time.monotonic()
        late = [each for each, stranger in self._strangers.items() if stranger.late <= now]
        for connection in late:
            self._turn_out(connection, f"no introduction within {self._patience_s:g} s")

    def _longest_of_the_crowd(self) -> socket.socket:
        hosts = Counter(stranger.host for stranger in self._strangers.values())
        ((crowded, _),) = hosts.most_common(1)
        return next(each for each, other in self._strangers.items() if other.host == crowded)

    def _turn_out(self, connection: socket.socket, reason: str) -> None:
        _turned_away(self._forget(connection), reason)
        connection.close()

    def _forget(self, connection: socket.socket) -> _Stranger:
        self._selector.unregister(connection)
        return self._strangers.pop(connection)


def _turned_away(stranger: _Stranger, reason: str) -> None:
    _log.warning("data connection rejected", peer=stranger.host, reason=reason)


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
