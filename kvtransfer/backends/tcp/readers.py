"""The readers that a tcp owner admits, and the open connections of each reader's key.

Knows keys, channels and threads, not pages. Any thread.
"""

import hmac
import os
import threading
from dataclasses import dataclass, field

from common.errors import Overloaded, ProtocolViolation
from kvtransfer.backends.tcp.channel import TcpChannel
from kvtransfer.backends.tcp.wire import KEY_BYTES, TcpProofs

_MAX_OF_ONE_READER = 80  # 64 ranks need one each, and some open a successor
_MAX_CONNECTIONS = 256
_MAX_COUNTS = 256  # more than connect at the same time


@dataclass(slots=True)
class _Reader:
    key: bytes
    counts: set[int] = field(default_factory=set)  # of its newest connections
    oldest: int = -1  # this count and smaller ones are not new
    channels: list[TcpChannel] = field(default_factory=list)  # oldest first


class TcpConsumers:
    """Keys and connections of the admitted readers.

    From `admit` to `dismiss` a reader has a key, and its connections end with the key. Connections
    are `proved` and then `enter` on one thread, the acceptor's.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers: dict[int, _Reader] = {}
        self._threads: dict[TcpChannel, threading.Thread] = {}
        self._closed = False

    def admit(self, reader: int) -> bytes:
        """Return the key of a reader. Creates it on the first call."""
        with self._lock:
            return self._readers.setdefault(reader, _Reader(os.urandom(KEY_BYTES))).key

    def dismiss(self, reader: int) -> None:
        with self._lock:
            dismissed = self._readers.pop(reader, None)
            for channel in dismissed.channels if dismissed else ():
                channel.end()

    def proved(self, reader: int, count: int, proof: bytes) -> TcpProofs:
        """Return all proofs of a connection, if it has sent the reader's proof.

        Raises:
            ProtocolViolation: the proof is invalid or was used before.
            Overloaded: too many connections are open.
        """
        with self._lock:
            known = self._readers.get(reader)
            num_open = len(self._threads)
        proofs = TcpProofs.by(known.key if known else os.urandom(KEY_BYTES), count)
        if known is None or not hmac.compare_digest(proof, proofs.of_reader):
            raise ProtocolViolation(f"no proof that it is reader {reader}")
        if count <= known.oldest or count in known.counts:
            raise ProtocolViolation(f"a proof of reader {reader} that is not new")
        if num_open >= _MAX_CONNECTIONS:
            raise Overloaded(f"{_MAX_CONNECTIONS} data connections are open")
        known.counts.add(count)  # ranks of a reader connect in any order
        if len(known.counts) > _MAX_COUNTS:
            known.oldest = min(known.counts)
            known.counts.remove(known.oldest)
        return proofs

    def enter(self, reader: int, channel: TcpChannel, thread: threading.Thread) -> None:
        """Start the thread of a reader's connection. The thread must call `leave`. Above the limit
        per reader, the reader's oldest connection is ended.

        Raises:
            ProtocolViolation: the reader has been dismissed in the meantime.
            Overloaded: this process cannot start a thread.
        """
        with self._lock:
            known = self._readers.get(reader)
            if self._closed or known is None:
                raise ProtocolViolation(f"reader {reader} is not admitted any more")
            try:
                thread.start()
            except RuntimeError as error:
                raise Overloaded(f"no thread for a data connection: {error}") from None
            if len(known.channels) >= _MAX_OF_ONE_READER:
                known.channels.pop(0).end()
            known.channels.append(channel)
            self._threads[channel] = thread

    def leave(self, reader: int, channel: TcpChannel) -> None:
        """Remove the channel and close it."""
        with self._lock:  # otherwise `end` might meet the descriptor of another file
            del self._threads[channel]
            known = self._readers.get(reader)
            if known is not None and channel in known.channels:
                known.channels.remove(channel)
            channel.close()

    def end_all(self) -> list[threading.Thread]:
        """Dismiss all readers and admit no more. Returns the threads that are about to end."""
        with self._lock:
            self._closed = True
            self._readers.clear()
            for channel in self._threads:
                channel.end()
            return list(self._threads.values())
