"""Witnesses: 8 bytes per simulated page, which replace KV and prove its tokens.

The witness of a page is the sum over its tokens of (token + 1) times a weight, which depends on the
page table and the index in the page. The witness of a state page is such a sum over all tokens of
the request, with weights of their positions, times an odd weight of the page. The total of a
request is the sum of the witnesses that its newest token sees, each times an odd weight of its
position: all pages of a full table, the pages inside a window, and all state pages. All sums are
modulo 2**64. A sampled token is a hash of the total, so each token of a response depends on every
page that it sees, and on their order.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.page_tables import PageTables

Words = NDArray[np.uint64]

# Letters, and spaces so that a response looks like words.
_TEXT = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz      ", np.uint8).astype(np.int32)
_STEP, _FIRST, _SECOND = (
    np.array(constant, np.uint64)
    for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_A_HALF, _A_PART, _MOST = np.uint64(30), np.uint64(27), np.uint64(31)
# Start of the numbers whose hashes are weights: for indices in pages, positions of pages, positions
# of state pages, and positions of tokens in states.
_PLACES, _STATES, _STATE_TOKENS = 1 << 20, 1 << 40, 1 << 41


def mix(values: Words) -> Words:
    """Return 64-bit hashes of these values (splitmix64)."""
    mixed = values * _STEP + _STEP
    mixed = (mixed ^ (mixed >> _A_HALF)) * _FIRST
    mixed = (mixed ^ (mixed >> _A_PART)) * _SECOND
    return mixed ^ (mixed >> _MOST)


@lru_cache(maxsize=8)
def token_weights(page_size: int, num_tables: int) -> Words:
    """Return the weight of each index in a page, by table."""
    return mix(np.arange(num_tables * page_size, dtype=np.uint64)).reshape(num_tables, page_size)


@lru_cache(maxsize=8)
def place_weights(num_pages: int) -> Words:
    """Return the weight of each page of a request by its position, all odd."""
    return mix(np.arange(_PLACES, _PLACES + num_pages, dtype=np.uint64)) | np.uint64(1)


@lru_cache(maxsize=8)
def state_weights(state_pages: int) -> Words:
    """Return the weight of each state page, all odd."""
    return mix(np.arange(_STATES, _STATES + state_pages, dtype=np.uint64)) | np.uint64(1)


def state_token_weights(places: NDArray[np.intp]) -> Words:
    """Return the weights of tokens in the recurrent state by their positions."""
    return mix(places.astype(np.uint64) + np.uint64(_STATE_TOKENS))


def tokens_of(totals: Words) -> NDArray[np.int32]:
    """Return the token that follows each total: the byte of a letter or a space."""
    return _TEXT[(mix(totals) % np.uint64(len(_TEXT))).astype(np.intp)]


def torn(before: Words, after: Words) -> Words:
    """Return copies of pages with these witnesses before and after the copy.

    The copy of a page that changed equals neither.
    """
    return np.where(before == after, after, ~(after ^ before))


def is_accepted(totals: Words, probability: float) -> NDArray[np.bool_]:
    """Return whether a draft of the token after each total is right, with this probability."""
    shares = mix(~totals) >> np.uint64(11)  # 53 bits
    right: NDArray[np.bool_] = shares < np.uint64(probability * (1 << 53))
    return right


def expected_tokens(prompt: Sequence[int], count: int, tables: PageTables) -> list[int]:
    """Return the first `count` tokens of the response that every correct node generates.

    Args:
        tables: page tables of the nodes.
    """
    num_pages = tables.num_pages(len(prompt) + count)
    weights = _weights(num_pages, tables)
    sums = np.zeros((len(weights), num_pages * tables.page_size + 1), np.uint64)
    known = np.asarray(prompt, np.uint64) + np.uint64(1)
    np.cumsum(known * weights[:, : len(known)], axis=1, out=sums[:, 1 : len(known) + 1])
    tokens = []
    for num_tokens in range(len(prompt), len(prompt) + count):
        totals = sums[:, num_tokens].sum(dtype=np.uint64, keepdims=True)
        for table, window in tables.sliding:
            totals -= sums[table, first_page(num_tokens, window, tables) * tables.page_size]
        token = tokens_of(totals)
        tokens.append(int(token[0]))
        part = (token.astype(np.uint64) + np.uint64(1)) * weights[:, num_tokens]
        sums[:, num_tokens + 1] = sums[:, num_tokens] + part
    return tokens


def first_page(num_tokens: Any, window: int, tables: PageTables) -> Any:
    """Return the first page that the last of `num_tokens` tokens sees. For arrays or numbers."""
    return np.maximum(num_tokens - window, 0) // tables.page_size


def _weights(num_pages: int, tables: PageTables) -> Words:
    """Return the weight of each token by its position: [tables and the state, positions]."""
    of_tokens = np.tile(token_weights(tables.page_size, tables.num_tables), num_pages)
    weights = of_tokens * np.repeat(place_weights(num_pages), tables.page_size)
    if not tables.state_pages:
        return weights
    of_pages = state_weights(tables.state_pages)
    in_state = state_token_weights(np.arange(weights.shape[1])) * (of_pages * of_pages).sum()
    return np.concatenate((weights, in_state[None]))
