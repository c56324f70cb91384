"""Identity of a LoRA adapter: a 16-byte hash of its content.

A name may later refer to other files, whose requests must not find KV made with the old files. So
nodes are called with the hash, and prefix caches are separated by it.
"""

from typing import TypeAlias

from common.errors import InvalidRequest
from common.requests.namespace import Namespace, part_of

ADAPTER_BYTES = 16
AdapterId: TypeAlias = bytes
NO_ADAPTER: AdapterId = b""


def check_adapter(adapter: bytes) -> AdapterId:
    """Return the id. Raises InvalidRequest if its length is wrong."""
    if len(adapter) not in (0, ADAPTER_BYTES):
        raise InvalidRequest(f"adapter has {len(adapter)} bytes; it has {ADAPTER_BYTES}, or none")
    return adapter


def within(namespace: Namespace, adapter: AdapterId) -> Namespace:
    """Return the namespace for KV made with that adapter."""
    return part_of(namespace, adapter, person=b"baton adapted KV")
