"""Namespace of a prompt in the prefix caches. KV is reused only within a namespace.

A router creates it. Nodes send and compare it without knowing its meaning. It has 16 bytes, or
none: requests without a namespace share one default namespace.

It has 128 bits and uses no secret key. An attacker who knows how namespaces are made could try
salts offline until one matches any namespace in use. The attacker could then use its cache. Among a
million namespaces that takes 2**108 tries. With 64 bits it would take 2**44. A secret key would
make 64 bits sufficient, but all routers would need the same key, and a new key would invalidate all
caches.
"""

from hashlib import blake2b
from typing import TypeAlias

from common.errors import InvalidRequest

NAMESPACE_BYTES = 16
Namespace: TypeAlias = bytes
SHARED: Namespace = b""


def namespace_of(salt: str, owner: str = "") -> Namespace:
    """Return the namespace for a salt. It is the same on every router.

    A namespace is private if its salt cannot be guessed.

    Args:
        salt: from the client.
        owner: at most 64 bytes. Namespaces of different owners, or without an owner, never match.
    """
    return blake2b(
        salt.encode(),
        digest_size=NAMESPACE_BYTES,
        key=owner.encode(),
        person=b"baton namespace",
    ).digest()


def part_of(namespace: Namespace, content: bytes, *, person: bytes) -> Namespace:
    """Return the part of a namespace for KV that also depends on `content`.

    Without content, it is the namespace itself.

    Args:
        namespace: of the client.
        content: hash of an adapter or of weights.
        person: personalisation for blake2b, which separates different kinds of content.
    """
    if not content:
        return namespace
    digest = blake2b(content, digest_size=NAMESPACE_BYTES, person=person)
    digest.update(namespace)
    return digest.digest()


def check_namespace(namespace: bytes) -> Namespace:
    """Return the namespace. Raises InvalidRequest if its length is wrong."""
    if len(namespace) not in (0, NAMESPACE_BYTES):
        raise InvalidRequest(
            f"namespace has {len(namespace)} bytes; it has {NAMESPACE_BYTES}, or none"
        )
    return namespace
