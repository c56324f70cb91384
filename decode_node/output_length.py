"""Expected duration of a response after its first token. A request's budget must leave this time.

The output length is unknown and may be far below `max_tokens`. The node assumes the 25th percentile
of its last responses, and at most `max_tokens`. A request rejected for lack of time would therefore
most likely have exceeded its budget.
"""

from collections import deque

ENOUGH = 16  # responses; with fewer, no estimate is made
REMEMBERED = 64


class OutputLengthEstimate:
    """Lengths and speeds of the last responses. Engine thread only."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=REMEMBERED)  # tokens
        self._token_s: deque[float] = deque(maxlen=REMEMBERED)

    def ended(self, num_tokens: int, seconds: float) -> None:
        """Record a response that was not cut short.

        Args:
            num_tokens: tokens of the response.
            seconds: from its first token to its last.
        """
        self._lengths.append(num_tokens)
        if num_tokens > 1:
            self._token_s.append(seconds / (num_tokens - 1))

    def seconds(self, max_tokens: int) -> float:
        """Return the expected seconds from first to last token. 0.0: not known yet."""
        if len(self._token_s) < ENOUGH:
            return 0.0
        num_tokens = min(max_tokens, sorted(self._lengths)[len(self._lengths) // 4])
        # The median is not affected by a short stall of the node.
        return (num_tokens - 1) * sorted(self._token_s)[len(self._token_s) // 2]
