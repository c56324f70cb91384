"""How long an answer takes here, once its first token is out: what a budget must leave for it.

How long an answer will be nobody knows, and its `max_tokens` may be far from it. It is reckoned to
be as short as a quarter of the last ones were, and never longer than `max_tokens`: what is refused
for want of time would most likely have been cut off by its budget.
"""

from collections import deque

ENOUGH = 16  # answers, before which nothing is said
REMEMBERED = 64


class AnswerPace:
    """Engine thread only."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=REMEMBERED)  # tokens
        self._token_s: deque[float] = deque(maxlen=REMEMBERED)

    def ended(self, num_tokens: int, seconds: float) -> None:
        """An answer that was not cut short had so many tokens, the last one so long after the
        first."""
        self._lengths.append(num_tokens)
        if num_tokens > 1:
            self._token_s.append(seconds / (num_tokens - 1))

    def seconds(self, max_tokens: int) -> float:
        """From the first token of an answer to its last; 0.0: not known yet."""
        if len(self._token_s) < ENOUGH:
            return 0.0
        num_tokens = min(max_tokens, sorted(self._lengths)[len(self._lengths) // 4])
        # The median: a node that stood still for a moment is not slow.
        return (num_tokens - 1) * sorted(self._token_s)[len(self._token_s) // 2]
