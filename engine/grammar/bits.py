"""One bit for each token of a vocabulary, the lowest first, in words of 32 bits."""

import numpy as np
from numpy.typing import NDArray

WORD = 32


def words_of(vocabulary_size: int) -> int:
    """Of a row of bits."""
    return -(-vocabulary_size // WORD)


def allow(bits: NDArray[np.int32], token: int) -> None:
    """In one row."""
    bits.view(np.uint32)[token // WORD] |= np.uint32(1 << (token % WORD))


def forbid(bits: NDArray[np.int32], token: int) -> None:
    """In one row."""
    bits.view(np.uint32)[token // WORD] &= ~np.uint32(1 << (token % WORD))
