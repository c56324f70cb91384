"""What a page of KV is found by below the tree: a hash of its namespace and of all tokens up to its
end, 128 bits, alike in every process.

Whoever finds a page by it gets its KV, and nobody compares tokens any more. So the hash is a
cryptographic one, unlike the names that routers are told (common/requests/prefix_hash.py).
"""

from collections.abc import Iterator
from hashlib import blake2b

from engine.batch.batch import Ints

KEY_BYTES = 16
PageKey = bytes


def page_keys(above: bytes, token_ids: Ints, page_size: int) -> Iterator[PageKey]:
    """Of each whole page of these tokens; each is made when it is asked for.

    Args:
        above: the key of the page before; of a prompt's first page, its namespace.
    """
    packed, size = token_ids.astype("<i4", copy=False).tobytes(), 4 * page_size
    for start in range(0, len(packed) - size + 1, size):
        page = above + packed[start : start + size]
        above = blake2b(page, digest_size=KEY_BYTES, person=b"baton page of KV").digest()
        yield above
