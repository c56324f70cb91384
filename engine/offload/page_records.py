"""The record of each page in a file.

A record has 64 bytes, including checksums of the record and of the page. A later process can
therefore verify the files instead of trusting them.

    index:  header | record of slot 0 | record of slot 1 | ...
    pages:  page of slot 0 | page of slot 1 | ...

A page is written before its record. After an interrupted write, one of the two checksums is
therefore wrong.
"""

import hashlib
from collections.abc import Iterator, Mapping
from struct import Struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from engine.kv_cache.radix_nodes import KEY_BYTES, PageKey

FORMAT = 1
HEADER_BYTES = 4096
VERSION_BYTES = 16
_HEADER = Struct(f"<16s{VERSION_BYTES}sQ")
_BODY = Struct(f"<{KEY_BYTES}sQQQHH12x")
_SUM = Struct("<Q")
RECORD_BYTES = _SUM.size + _BODY.size


class PageRecord(NamedTuple):
    """The record of one page.

    Attributes:
        key, name, place: identify the page, see TierEntry.
        order: the newer of two records has the larger number.
        width: number of places per page of tokens.
    """

    key: PageKey
    name: int
    order: int
    checksum: int
    place: int
    width: int


def checksum(page: memoryview) -> int:
    return xxh3_64_intdigest(page)


def version_of(fingerprint: Mapping[str, str], weights: bytes) -> bytes:
    """Return the version of pages: a digest of everything on which their content depends.

    Args:
        fingerprint: the fingerprint of an engine, by field.
        weights: the id of the content of all weights.
    """
    digest = hashlib.blake2b(digest_size=VERSION_BYTES, person=b"baton files KV")
    for field in (
        f"{FORMAT}",
        weights.hex(),
        *(f"{name}={fingerprint[name]}" for name in sorted(fingerprint)),
    ):
        digest.update(f"{len(field)}:{field}".encode())
    return digest.digest()


def header(version: bytes, page_bytes: int) -> bytes:
    return _HEADER.pack(b"baton pages", version, page_bytes).ljust(HEADER_BYTES, b"\0")


def packed(record: PageRecord, slot: int) -> bytes:
    body = _BODY.pack(*record)
    return _SUM.pack(xxh3_64_intdigest(body, seed=slot)) + body


def unpacked(index: bytes) -> Iterator[tuple[int, PageRecord]]:
    """Yield slots and records of an index without its header. Invalid records are left out."""
    for slot, at in enumerate(range(0, len(index) - RECORD_BYTES + 1, RECORD_BYTES)):
        body = index[at + _SUM.size : at + RECORD_BYTES]
        (expected,) = _SUM.unpack_from(index, at)
        if expected and expected == xxh3_64_intdigest(body, seed=slot):
            yield slot, PageRecord(*_BODY.unpack(body))
