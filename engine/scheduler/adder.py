"""PrefillAdder: selects the prompts, and the part of each, for one prefill forward.

It tracks three budgets: pages (free and evictable, minus the expected growth of running requests),
input tokens of the forward, and tokens of the chunk. It is pure arithmetic: it moves no page and
knows no request.
"""


class PrefillAdder:
    """The budgets of one prefill batch. Each reservation reduces them.

    Args:
        reserved_pages: pages kept free for the growth of others.
        input_tokens: prompt tokens over all rows; the first row may exceed it.
        chunk_tokens: all tokens of the forward; None: prompts are never cut.
    """

    def __init__(
        self, *, page_size: int, reserved_pages: int, input_tokens: int, chunk_tokens: int | None
    ) -> None:
        self._page_size = page_size
        self._reserved_pages = reserved_pages
        self._input_left = input_tokens
        self._chunk_left = chunk_tokens
        self._empty = True

    def has_room(self, num_pages: float, available: int) -> bool:
        """Return whether a request that may need up to `num_pages` can get them from `available`
        pages."""
        return num_pages <= available - self._reserved_pages

    def reserve(self, num_pages: int) -> None:
        """Keep this many more pages free, for the growth of a request of this batch."""
        self._reserved_pages += num_pages

    def cut(self, start: int, end: int) -> int:
        """Use the budgets for as many of the tokens [start, end) as fit. `start` is page aligned.

        Returns:
            The token index at which this forward must stop: `end`, or a page boundary before
                it, or `start` if the budgets are used up. The first row of a batch gets one page at
                least.
        """
        num_tokens = end - start
        if self._chunk_left is not None and num_tokens > self._chunk_left:
            num_tokens = self._chunk_left // self._page_size * self._page_size
            if self._empty:
                num_tokens = min(end - start, max(num_tokens, self._page_size))
        if num_tokens <= 0 or (num_tokens > self._input_left and not self._empty):
            return start
        self._empty = False
        self._input_left -= num_tokens
        if self._chunk_left is not None:
            self._chunk_left -= num_tokens
        return start + num_tokens
