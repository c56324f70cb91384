"""What two ends of a tcp data connection say to each other, and how each proves who it is.

    owner   GREETING: magic, challenge
    reader  INTRODUCTION: instance id, nonce, proof
    owner   proof, or the end of the connection
    reader  REQUEST: kind, number of pages; page ids as little-endian int32     (again and again,
    owner   REPLY: DATA, then the raw pages in that order                         in the same order)
                 | REFUSED and a page id, then zeros

A reply is as long as its request says, so that a reader lands head and pages in one call. A request
asks for as much as an owner can be expected to stage, and always for one page at least.

The key is made for one reader of one owner process, and told in the owner's Hello: a connection
to a process that took over the port, or from anyone but that reader, proves nothing.
"""

import hashlib
import hmac
import socket
import struct
from enum import IntEnum
from typing import Annotated

import msgspec

KEY_BYTES = 32
NONCE_BYTES = 16
MAGIC = b"Btn1"

GREETING = struct.Struct(f"<4s{NONCE_BYTES}s")
INTRODUCTION = struct.Struct(f"<Q{NONCE_BYTES}s{KEY_BYTES}s")
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
    """What Owner.describe holds."""

    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    key: Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    scratch_pages: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


def max_request_pages(page_bytes: int) -> int:
    """How many pages one request may ask for."""
    return min(MAX_REQUEST_PAGES, max(1, MAX_REQUEST_BYTES // page_bytes))


def reader_key(secret: bytes, reader: int) -> bytes:
    """The key of one reader. The owner keeps its secret and no list of keys."""
    return hmac.digest(secret, b"key" + reader.to_bytes(8, "little"), hashlib.sha256)


def reader_proof(key: bytes, challenge: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, b"reader" + challenge + nonce, hashlib.sha256)


def owner_proof(key: bytes, challenge: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, b"owner" + challenge + nonce, hashlib.sha256)


def set_options(connection: socket.socket) -> None:
    """Small requests leave at once, and a silent or vanished peer ends the connection."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_EVERY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
