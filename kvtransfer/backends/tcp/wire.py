"""The wire format of a tcp data connection, and how its two ends authenticate each other.

    consumer  INTRODUCTION: magic, consumer number, count, proof
    producer   proof, or the end of the connection
    both    a TLS handshake, if the description has a certificate, then the consumer's seal
    consumer  REQUEST: kind, number of pages, offset and length in each page,
                     page ids as little-endian int32                  (repeated)
    producer   REPLY: DATA, then these bytes of the pages in that order  (in the order of requests)
                 | REFUSED and a page id, then zeros

The request determines the length of its reply, so that a consumer receives head and pages in one
call. A request asks for at least one byte of a page, and at most MAX_REQUEST_BYTES (or one page).

Each consumer, that is, each pair stream, has its own key, which the producer's Hello carries.
Neither a process that took over the producer's port nor any other consumer can compute the proofs.
The consumer sends first, so that the producer can identify it on the first read. Each connection
has a new count, so that a recorded proof cannot be replayed. TLS starts after the proofs, so that
unauthenticated callers cannot cause handshakes. The seal binds the TLS session to the consumer that
sent the proof, so that a relayed proof is useless.
"""

import hashlib
import hmac
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

import msgspec

KEY_BYTES = 32
MAGIC = b"Btn3"

INTRODUCTION = struct.Struct(f"<4sQQ{KEY_BYTES}s")
REQUEST = struct.Struct("<IIQQ")
REPLY = struct.Struct("<Ii")

MAX_REQUEST_PAGES = 1023  # the reply's head is one more vector of the same sendmsg
MAX_REQUEST_BYTES = 4 << 20

_KEEPALIVE_IDLE_S = 5
_KEEPALIVE_EVERY_S = 2
_KEEPALIVE_PROBES = 3
_UNACKNOWLEDGED_MS = 10_000


class FrameKind(IntEnum):
    """The kind of producer memory that a request reads."""

    POOL = 0
    SCRATCH = 1


class FrameStatus(IntEnum):
    DATA = 0
    REFUSED = 1


class TcpDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The description that PageProducer.admit returns."""

    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    consumer: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    key: Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    certificate: Annotated[bytes, msgspec.Meta(max_length=64)]  # SHA-256 of it; empty: no TLS
    scratch_pages: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


def max_request_pages(size: int) -> int:
    """Return how many pages one request may name if it reads `size` bytes of each."""
    return min(MAX_REQUEST_PAGES, max(1, MAX_REQUEST_BYTES // size))


def max_request_bytes(page_bytes: int) -> int:
    """Return the largest number of bytes that one request for pages of this size may read."""
    return max(page_bytes, min(MAX_REQUEST_BYTES, MAX_REQUEST_PAGES * page_bytes))


@dataclass(frozen=True, slots=True)
class TcpProofs:
    """Proofs for one connection, which only the two holders of the key can compute."""

    of_consumer: bytes
    of_producer: bytes
    seal: bytes

    @classmethod
    def by(cls, key: bytes, count: int) -> "TcpProofs":
        def proof(what: bytes) -> bytes:
            return hmac.digest(key, what + count.to_bytes(8, "little"), hashlib.sha256)

        return cls(proof(b"consumer"), proof(b"producer"), proof(b"seal"))


def set_options(connection: socket.socket) -> None:
    """Disable Nagle's algorithm, and set keep-alive and timeouts, so that a silent or vanished peer
    ends the connection.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_EVERY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
