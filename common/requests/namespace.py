"""Identities that separate KV (namespaces, adapters, weight versions), and the hash of a prefix.

KV is reused only within a namespace. A router derives it from the client's salt. Nodes only compare
it. It has 16 bytes, or none: requests without a namespace share one default namespace.

It has 128 bits and needs no secret key. An attacker could try salts offline until one matches any
namespace in use, whose cache the attacker could then use. Among a million namespaces that takes
2**108 tries, where 64 bits would take 2**44. With a secret key, 64 bits would be enough, but all
routers would need the same key, and a new key would invalidate all caches.

A LoRA adapter is identified by a 16-byte hash of its content, because its name may later refer to
other files, whose requests must not use KV of the old files.

A weight version is a 16-byte hash of a node's weights, the same whether they were loaded at the
start or later. KV of other weights is useless, so nodes pair only within one version, and prefix
caches are separated by it. A request for KV names the sender's version, and a node with another
version rejects it.

The hash of a prefix is the 64-bit XXH3 of its namespace and its token ids as little-endian int32,
the same on every machine. A page of a prefix cache is identified by the hash of the prefix that
ends with it. The hash only finds prefixes that are probably cached. Reuse of KV compares namespaces
and tokens.
"""

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import TypeAlias

from xxhash import xxh3_64

from common.errors import InvalidRequest

IDENTITY_BYTES = 16  # size of a namespace, an adapter id and a weight version
Namespace: TypeAlias = bytes
SHARED: Namespace = b""


def namespace_of(salt: str, owner: str = "") -> Namespace:
    """Return the namespace for a salt, the same on every router.

    A namespace is private if its salt cannot be guessed.

    Args:
        owner: at most 64 bytes. Namespaces of different owners, or without an owner, never match.
    """
    return blake2b(
        salt.encode(),
        digest_size=IDENTITY_BYTES,
        key=owner.encode(),
        person=b"baton namespace",
    ).digest()


def part_of(namespace: Namespace, content: bytes, *, person: bytes) -> Namespace:
    """Return the namespace for KV that also depends on `content`. Without content: unchanged.

    Args:
        content: hash of an adapter or of weights.
        person: personalisation for blake2b, which separates kinds of content.
    """
    if not content:
        return namespace
    digest = blake2b(content, digest_size=IDENTITY_BYTES, person=person)
    digest.update(namespace)
    return digest.digest()


def check_identity(field: str, value: bytes) -> bytes:
    """Return the value. Raises InvalidRequest unless it has 16 bytes or none."""
    if len(value) not in (0, IDENTITY_BYTES):
        raise InvalidRequest(f"{field} has {len(value)} bytes, expected {IDENTITY_BYTES} or 0")
    return value


AdapterId: TypeAlias = bytes
NO_ADAPTER: AdapterId = b""


def within(namespace: Namespace, adapter: AdapterId) -> Namespace:
    """Return the namespace for KV made with that adapter."""
    return part_of(namespace, adapter, person=b"baton adapted KV")


WeightsId: TypeAlias = bytes
UNNAMED: WeightsId = b""  # not reported, or unknown


def made_with(namespace: Namespace, weights: WeightsId) -> Namespace:
    """Return the namespace for KV computed with these weights."""
    return part_of(namespace, weights, person=b"baton weights KV")


BYTES_PER_TOKEN = 4


def as_bytes(token_ids: Sequence[int]) -> bytes:
    """Return token ids as little-endian int32.

    Raises:
        OverflowError: an id is negative or does not fit into 32 bits.
    """
    # "I" with fromlist is several times faster than "i" or the array's constructor.
    packed = array("I")
    packed.fromlist(list(token_ids))
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


class PrefixHasher:
    """Hashes of the pages of a growing prompt."""

    def __init__(self, begun: bytes | memoryview = b"") -> None:
        """
        Args:
            begun: the namespace, then the tokens before the first page, in the form of `as_bytes`.
        """
        self._hash = xxh3_64(begun)

    def copy(self) -> "PrefixHasher":
        """Return a copy, for another continuation of the same prefix."""
        other = PrefixHasher()
        other._hash = self._hash.copy()
        return other

    def extend(self, tokens: bytes | memoryview, page_size: int) -> list[int]:
        """Return the hashes of the prefixes that end with each whole page in `tokens`.

        An incomplete page at the end is ignored.
        """
        size = page_size * BYTES_PER_TOKEN
        update, digest = self._hash.update, self._hash.intdigest
        names: list[int] = []
        for start in range(0, len(tokens) - size + 1, size):
            update(tokens[start : start + size])
            names.append(digest())
        return names


def page_names(
    token_ids: Sequence[int], page_size: int, namespace: Namespace = SHARED
) -> list[int]:
    """Return the hashes of all prefixes in whole pages, shortest first."""
    return PrefixHasher(namespace).extend(as_bytes(token_ids), page_size)
