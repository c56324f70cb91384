"""How much room running requests will need: the new-token ratio of the seeds.

Reserving all of a request's remaining tokens wastes the pool, since most end early; reserving
none ends in retraction. The ratio starts cautious, decays while all goes well, and jumps back
after a retraction. Knows nothing of who holds pages.
"""

import math

import numpy as np

from engine.batch.batch import Ints

CLIP_NEW_TOKENS = 4096  # remaining tokens of one request that are ever counted
LOOK_AHEAD_STEPS = 20  # after a retraction, every request left must have room for so many steps


class NewTokenRatio:
    """Share of the remaining tokens of a running request for which pages are kept free."""

    def __init__(self, first: float, last: float, steps: int) -> None:
        self._first = first
        self._last = min(first, last)
        self._per_step = (self._first - self._last) / steps
        self.value = first

    def decay(self) -> None:
        """One decode step went well."""
        self.value = max(self._last, self.value - self._per_step)

    def raise_after_retraction(self, generated: int, max_new: int, num_requests: int) -> None:
        """Assumes that the requests left are as far as they seem, and looks ahead from there.

        Args:
            generated: tokens that they have generated, in total.
            max_new: tokens that they may generate at most, in total.
        """
        ahead = generated + LOOK_AHEAD_STEPS * num_requests
        self.value = max(self.value, min(1.0, ahead / (max_new + 1)))

    def reset(self) -> None:
        """Nothing is running any more."""
        self.value = self._first


def missing_pages(
    length: Ints, max_length: Ints, capacity: Ints, ratio: float, page_size: int
) -> Ints:
    """Pages of one table to keep free for each running request; [num_requests] all.

    A request of `length` tokens computes index length - 1 next, and its last token has no KV. So a
    request that goes on and whose pages are full counts one page at least.
    """
    remaining = np.clip(max_length - length, 0, CLIP_NEW_TOKENS)
    tokens = length - 1 + np.ceil(remaining * ratio).astype(np.int32)
    missing = np.maximum(tokens - capacity, 0)
    pages: Ints = (missing + page_size - 1) // page_size
    return pages


def missing_pages_of_one(
    length: int, max_length: int, capacity: int, ratio: float, page_size: int
) -> int:
    """The same for one request that is going to run."""
    remaining = min(max(max_length - length, 0), CLIP_NEW_TOKENS)
    missing = length - 1 + math.ceil(remaining * ratio) - capacity
    return max(0, -(-missing // page_size))
