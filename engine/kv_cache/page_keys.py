"""Keys of KV pages below the tree: a 128-bit hash of the namespace and of all tokens up to the
page's end, equal in every process.

A lookup by key returns KV without comparing tokens. The hash is therefore cryptographic, unlike the
page names that are reported to routers (common/requests/prefix_hash.py).
"""

from collections.abc import Iterator
from hashlib import blake2b

from engine.batch.batch import Ints

KEY_BYTES = 16
PageKey = bytes


def page_keys(above: bytes, token_ids: Ints, page_size: int) -> Iterator[PageKey]:
    """Yield the key of each whole page of these tokens, computed on demand.

    Args:
        above: the key of the previous page; for a prompt's first page, its namespace.
    """
    packed, size = token_ids.astype("<i4", copy=False).tobytes(), 4 * page_size
    for start in range(0, len(packed) - size + 1, size):
        page = above + packed[start : start + size]
        above = blake2b(page, digest_size=KEY_BYTES, person=b"baton page of KV").digest()
        yield above
