"""The 64-bit hash of a prefix of a prompt, the same on every machine.

It is the XXH3 of the prefix's namespace (namespace.py) and its token ids as little-endian int32. A
page of a prefix cache is identified by the hash of the prefix that it ends. The hash finds prefixes
that are probably cached. Reuse of KV compares namespaces and tokens.
"""

import sys
from array import array
from collections.abc import Sequence

from xxhash import xxh3_64

from common.requests.namespace import SHARED, Namespace

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
        """Start after a prefix.

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
