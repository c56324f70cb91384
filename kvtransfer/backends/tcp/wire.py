"""What two ends of a tcp data connection say to each other, and how each proves who it is.

    reader  INTRODUCTION: magic, its number, count, proof
    owner   proof, or the end of the connection
    both    a TLS handshake, where the description names a certificate; in it the reader's seal
    reader  REQUEST: kind, number of pages; page ids as little-endian int32     (again and again,
    owner   REPLY: DATA, then the raw pages in that order                         in the same order)
                 | REFUSED and a page id, then zeros

A reply is as long as its request says, so that a reader lands head and pages in one call. A request
asks for as much as an owner can be expected to stage, and always for one page at least.

The key is made for one reader, which is one pair stream, and told in the owner's Hello: a
connection to a process that took over the port, or from anyone but that reader, proves nothing. The
reader speaks first and at once, so that the owner knows it with its first look. Its count grows
with every connection: a proof that was overheard is none any more. TLS begins behind the proofs, so
that no stranger has the owner compute a handshake; the seal says that who has proved to be the
reader is who speaks in it, and not someone who passed that proof on.
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
MAGIC = b"Btn2"

INTRODUCTION = struct.Struct(f"<4sQQ{KEY_BYTES}s")
REQUEST = struct.Struct("<II")
REPLY = struct.Struct("<Ii")

MAX_REQUEST_PAGES = 1023  # and the head of the reply: the vectors of one sendmsg
MAX_REQUEST_BYTES = 4 << 20

_KEEPALIVE_IDLE_S = 5
_KEEPALIVE_EVERY_S = 2
_KEEPALIVE_PROBES = 3
_UNACKNOWLEDGED_MS = 10_000


class Kind(IntEnum):
    """Which memory of the owner a request means."""

    POOL = 0
    SCRATCH = 1


class Status(IntEnum):
    DATA = 0
    REFUSED = 1


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What Owner.admit tells."""

    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    reader: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    key: Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    certificate: Annotated[bytes, msgspec.Meta(max_length=64)]  # SHA-256 of it; empty: no TLS
    scratch_pages: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


def max_request_pages(page_bytes: int) -> int:
    """How many pages one request may ask for."""
    return min(MAX_REQUEST_PAGES, max(1, MAX_REQUEST_BYTES // page_bytes))


@dataclass(frozen=True, slots=True)
class Proofs:
    """What only the two who have the key can say, each for one connection."""

    of_reader: bytes
    of_owner: bytes
    seal: bytes

    @classmethod
    def by(cls, key: bytes, count: int) -> "Proofs":
        def proof(what: bytes) -> bytes:
            return hmac.digest(key, what + count.to_bytes(8, "little"), hashlib.sha256)

        return cls(proof(b"reader"), proof(b"owner"), proof(b"seal"))


def set_options(connection: socket.socket) -> None:
    """Small requests leave at once, and a silent or vanished peer ends the connection."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_EVERY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
