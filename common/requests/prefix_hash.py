"""The name of a prefix of a prompt, alike on every machine: 64 bits.

It is the XXH3 of the prefix's namespace (namespace.py) and its token ids as little-endian int32.
A page of a prefix cache is named by the prefix that it ends. That serves to find what is probably
cached where; whoever reuses KV compares namespaces and tokens.
"""

import sys
from array import array
from collections.abc import Sequence

from xxhash import xxh3_64

from common.requests.namespace import SHARED, Namespace

BYTES_PER_TOKEN = 4


def as_bytes(token_ids: Sequence[int]) -> bytes:
    """Little-endian int32.

    Raises:
        OverflowError: an id is negative, or no 32-bit integer.
    """
    # "I" and fromlist: "i", or the array's constructor, take several times as long.
    packed = array("I")
    packed.fromlist(list(token_ids))
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


class PrefixHasher:
    """Names the pages of one prompt as it grows."""

    def __init__(self, begun: bytes | memoryview = b"") -> None:
        """
        Args:
            begun: the namespace, then the tokens, as of `as_bytes`, after which naming begins.
        """
        self._hash = xxh3_64(begun)

    def copy(self) -> "PrefixHasher":
        """For another continuation of the same prefix."""
        other = PrefixHasher()
        other._hash = self._hash.copy()
        return other

    def extend(self, tokens: bytes | memoryview, page_size: int) -> list[int]:
        """The names of the prefixes that end with each whole page in `tokens`; what is no whole
        page at the end is left out."""
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
    """Of every prefix in whole pages, the shortest first."""
    return PrefixHasher(namespace).extend(as_bytes(token_ids), page_size)
