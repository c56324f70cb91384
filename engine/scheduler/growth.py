"""The expected page growth of running requests: the new-token ratio of the seeds.

Reserving all remaining tokens of a request wastes the pool, since most requests end early.
Reserving none leads to retraction. The ratio starts cautious, decays with each successful step, and
jumps back after a retraction. This module does not know who holds pages.
"""

import math

import numpy as np

from engine.batch.batch import Ints

CLIP_NEW_TOKENS = 4096  # maximum remaining tokens counted per request
# after a retraction, every remaining request must have pages for this many steps
LOOK_AHEAD_STEPS = 20


class NewTokenRatio:
    """Share of a running request's remaining tokens for which pages are kept free."""

    def __init__(self, first: float, last: float, steps: int) -> None:
        self._first = first
        self._last = min(first, last)
        self._per_step = (self._first - self._last) / steps
        self.value = first

    def decay(self) -> None:
        """Lower the ratio after a successful decode step."""
        self.value = max(self._last, self.value - self._per_step)

    def raise_after_retraction(self, generated: int, max_new: int, num_requests: int) -> None:
        """Raise the ratio to the share that the remaining requests have generated, plus a
        look-ahead.

        Args:
            generated: tokens that they have generated, in total.
            max_new: tokens that they may generate at most, in total.
        """
        ahead = generated + LOOK_AHEAD_STEPS * num_requests
        self.value = max(self.value, min(1.0, ahead / (max_new + 1)))

    def reset(self) -> None:
        """Reset the ratio once no request is running."""
        self.value = self._first


def missing_pages(
    length: Ints, max_length: Ints, capacity: Ints, ratio: float, page_size: int
) -> Ints:
    """Return the pages of one table to keep free for each running request; all [num_requests].

    A request of `length` tokens computes index length - 1 next, and its last token has no KV. A
    request that continues and whose pages are full therefore counts one page at least.
    """
    remaining = np.clip(max_length - length, 0, CLIP_NEW_TOKENS)
    tokens = length - 1 + np.ceil(remaining * ratio).astype(np.int32)
    missing = np.maximum(tokens - capacity, 0)
    pages: Ints = (missing + page_size - 1) // page_size
    return pages


def missing_pages_of_one(
    length: int, max_length: int, capacity: int, ratio: float, page_size: int
) -> int:
    """Return the same for one request that is going to run."""
    remaining = min(max(max_length - length, 0), CLIP_NEW_TOKENS)
    missing = length - 1 + math.ceil(remaining * ratio) - capacity
    return max(0, -(-missing // page_size))
