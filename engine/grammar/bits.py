"""Bit masks over a vocabulary: one bit for each token, the lowest first, in 32-bit words."""

import numpy as np
from numpy.typing import NDArray

WORD = 32


def words_of(vocabulary_size: int) -> int:
    """Return the number of words in a row of bits."""
    return -(-vocabulary_size // WORD)


def allow(bits: NDArray[np.int32], token: int) -> None:
    """Set the token's bit in a row."""
    bits.view(np.uint32)[token // WORD] |= np.uint32(1 << (token % WORD))


def forbid(bits: NDArray[np.int32], token: int) -> None:
    """Clear the token's bit in a row."""
    bits.view(np.uint32)[token // WORD] &= ~np.uint32(1 << (token % WORD))
