"""The keys of the consumers that a tcp producer has admitted, and the open connections of each key.
Thread-safe.
"""

import hmac
import os
import threading
from dataclasses import dataclass, field

from common.errors import Overloaded, ProtocolViolation
from kvtransfer.backends.tcp.channel import TcpChannel
from kvtransfer.backends.tcp.wire import KEY_BYTES, TcpProofs

_MAX_OF_ONE_CONSUMER = 80  # up to 64 ranks have one each, and some reconnect before it ends
_MAX_CONNECTIONS = 256
_MAX_COUNTS = 256  # above the number of connections that connect at once


@dataclass(slots=True)
class _Consumer:
    key: bytes
    counts: set[int] = field(default_factory=set)  # counts of its newest connections
    oldest: int = -1  # this count and smaller ones are rejected as replays
    channels: list[TcpChannel] = field(default_factory=list)  # oldest first


class TcpConsumers:
    """Keys and connections of the admitted consumers.

    A consumer has a key from `admit` to `dismiss`, which also ends its connections. For each new
    connection, the acceptor's thread calls `proved` and then `enter`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._consumers: dict[int, _Consumer] = {}
        self._threads: dict[TcpChannel, threading.Thread] = {}
        self._closed = False

    def admit(self, consumer: int) -> bytes:
        """Return the key of a consumer. Creates it on the first call."""
        with self._lock:
            return self._consumers.setdefault(consumer, _Consumer(os.urandom(KEY_BYTES))).key

    def dismiss(self, consumer: int) -> None:
        with self._lock:
            dismissed = self._consumers.pop(consumer, None)
            for channel in dismissed.channels if dismissed else ():
                channel.end()

    def proved(self, consumer: int, count: int, proof: bytes) -> TcpProofs:
        """Check the proof of a new connection, and return all proofs for it.

        Raises:
            ProtocolViolation: the proof is invalid or was used before.
            Overloaded: too many connections are open.
        """
        with self._lock:
            known = self._consumers.get(consumer)
            num_open = len(self._threads)
        proofs = TcpProofs.by(known.key if known else os.urandom(KEY_BYTES), count)
        if known is None or not hmac.compare_digest(proof, proofs.of_consumer):
            raise ProtocolViolation(f"it did not prove that it is consumer {consumer}")
        if count <= known.oldest or count in known.counts:
            raise ProtocolViolation(f"the proof of consumer {consumer} was used before")
        if num_open >= _MAX_CONNECTIONS:
            raise Overloaded(f"{_MAX_CONNECTIONS} data connections are open")
        known.counts.add(count)  # ranks of one consumer connect in any order
        if len(known.counts) > _MAX_COUNTS:
            known.oldest = min(known.counts)
            known.counts.remove(known.oldest)
        return proofs

    def enter(self, consumer: int, channel: TcpChannel, thread: threading.Thread) -> None:
        """Start the thread of a consumer's connection, which must call `leave` at its end. Above
        the limit per consumer, the consumer's oldest connection is ended.

        Raises:
            ProtocolViolation: the consumer has been dismissed in the meantime.
            Overloaded: this process cannot start a thread.
        """
        with self._lock:
            known = self._consumers.get(consumer)
            if self._closed or known is None:
                raise ProtocolViolation(f"consumer {consumer} is no longer admitted")
            try:
                thread.start()
            except RuntimeError as error:
                raise Overloaded(f"no thread for a data connection: {error}") from None
            if len(known.channels) >= _MAX_OF_ONE_CONSUMER:
                known.channels.pop(0).end()
            known.channels.append(channel)
            self._threads[channel] = thread

    def leave(self, consumer: int, channel: TcpChannel) -> None:
        with self._lock:  # otherwise `end` might shut down another file's descriptor
            del self._threads[channel]
            known = self._consumers.get(consumer)
            if known is not None and channel in known.channels:
                known.channels.remove(channel)
            channel.close()

    def end_all(self) -> list[threading.Thread]:
        """Dismiss all consumers and admit no more. Returns the threads that are about to end."""
        with self._lock:
            self._closed = True
            self._consumers.clear()
            for channel in self._threads:
                channel.end()
            return list(self._threads.values())
