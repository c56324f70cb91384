"""What names an adapter between programs: a hash of what it computes, 16 bytes.

A name may be given to other files later; KV that was made with the old ones must not be found by
it. So nodes are asked for the content, and prefix caches part by it.
"""

from typing import TypeAlias

from common.errors import InvalidRequest
from common.requests.namespace import Namespace, part_of

ADAPTER_BYTES = 16
AdapterId: TypeAlias = bytes
NO_ADAPTER: AdapterId = b""


def check_adapter(adapter: bytes) -> AdapterId:
    """Raises InvalidRequest for what names no adapter."""
    if len(adapter) not in (0, ADAPTER_BYTES):
        raise InvalidRequest(f"adapter has {len(adapter)} bytes; it has {ADAPTER_BYTES}, or none")
    return adapter


def within(namespace: Namespace, adapter: AdapterId) -> Namespace:
    """The part of a namespace in which KV is made with that adapter."""
    return part_of(namespace, adapter, person=b"baton adapted KV")
