"""KV that proves which tokens it was computed from: 8 bytes a page.

A page's witness is the sum over its tokens of (token + 1) times a weight of the index in the page.
The total of a request is the sum over its pages of the witness times an odd weight of the page's
place. All sums are modulo 2**64. A sampled token is a hash of the total. So each token of a
response depends on every page of its request, and on their order.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

# Letters, and spaces so that a response looks like words.
_TEXT = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz      ", np.uint8).astype(np.int32)
_STEP, _FIRST, _SECOND = (
    np.array(constant, np.uint64)
    for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_A_HALF, _A_PART, _MOST = np.uint64(30), np.uint64(27), np.uint64(31)
_PLACES = 1 << 20  # distinguishes the weights of pages from those of tokens


def mix(values: Words) -> Words:
    """Return well-mixed 64-bit hashes of these values (splitmix64)."""
    mixed = values * _STEP + _STEP
    mixed = (mixed ^ (mixed >> _A_HALF)) * _FIRST
    mixed = (mixed ^ (mixed >> _A_PART)) * _SECOND
    return mixed ^ (mixed >> _MOST)


@lru_cache(maxsize=8)
def token_weights(page_size: int) -> Words:
    """Return the weight of each index in a page."""
    return mix(np.arange(page_size, dtype=np.uint64))


@lru_cache(maxsize=8)
def place_weights(num_pages: int) -> Words:
    """Return the weight of each page of a request by its place, all odd."""
    return mix(np.arange(_PLACES, _PLACES + num_pages, dtype=np.uint64)) | np.uint64(1)


def tokens_of(totals: Words) -> NDArray[np.int32]:
    """Return the token that follows each total. It is the byte of a letter or a space."""
    return _TEXT[(mix(totals) % np.uint64(len(_TEXT))).astype(np.intp)]


def expected_tokens(prompt: Sequence[int], count: int, page_size: int) -> list[int]:
    """Return the first `count` tokens of the response to a prompt, as every correct node has them.

    Args:
        page_size: tokens per page of the nodes.
    """
    num_pages = -(-(len(prompt) + count) // page_size)
    known = np.zeros(num_pages * page_size, np.uint64)
    known[: len(prompt)] = np.asarray(prompt, np.uint64) + np.uint64(1)
    weights = np.tile(token_weights(page_size), num_pages)
    weights = weights * np.repeat(place_weights(num_pages), page_size)
    totals = (known * weights).sum(dtype=np.uint64, keepdims=True)
    tokens = []
    for place in range(len(prompt), len(prompt) + count):
        token = tokens_of(totals)
        tokens.append(int(token[0]))
        totals = totals + (token.astype(np.uint64) + np.uint64(1)) * weights[place : place + 1]
    return tokens
