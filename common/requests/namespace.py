"""The namespace of a prompt in the prefix caches: KV is reused within one, never across two.

A router makes it; nodes carry and compare it, and do not know what it stands for. It is 16 bytes,
or none: then the prompt is shared with all others that have none.

128 bits, and no secret. Whoever knows what others' namespaces are made of can try salts at home
until one falls into any of them, and would find there what its owner has sent. Among a million of
them that takes 2**108 tries; with 64 bits it would take 2**44. With a secret key 64 would do, but
every router would have to have the same one, and a new one would empty all caches.
"""

from hashlib import blake2b
from typing import TypeAlias

from common.errors import InvalidRequest

NAMESPACE_BYTES = 16
Namespace: TypeAlias = bytes
SHARED: Namespace = b""


def namespace_of(salt: str, owner: str = "") -> Namespace:
    """Alike on every router. A salt that nobody can guess is a namespace that nobody can enter.

    Args:
        owner: at most 64 bytes; no salt of one owner, or of none, makes a namespace of another's.
    """
    return blake2b(
        salt.encode(),
        digest_size=NAMESPACE_BYTES,
        key=owner.encode(),
        person=b"baton namespace",
    ).digest()


def part_of(namespace: Namespace, content: bytes, *, person: bytes) -> Namespace:
    """The part of a namespace that is for KV made with some content besides; all of it where there
    is none.

    Args:
        person: of blake2b: contents of different kinds have different parts.
    """
    if not content:
        return namespace
    digest = blake2b(content, digest_size=NAMESPACE_BYTES, person=person)
    digest.update(namespace)
    return digest.digest()


def check_namespace(namespace: bytes) -> Namespace:
    """Raises InvalidRequest for what no router makes."""
    if len(namespace) not in (0, NAMESPACE_BYTES):
        raise InvalidRequest(
            f"namespace has {len(namespace)} bytes; it has {NAMESPACE_BYTES}, or none"
        )
    return namespace
