"""What peers ask that the engine thread has not taken yet, by stream: a step may last, and readers
go on.

The engine bounds what it has taken. Until then this does, by tokens, so that what is opened and
cancelled during one step does not pile up. Each stream has its share of what may wait. Knows events
by their number alone, in the order in which they are taken.
"""

from collections import Counter, deque

MAX_TOKENS = 16 << 20
SHORTEST_TOKENS = 1024  # that one counts for, however short: it is a record too


class Untaken:
    """Transfer thread only.

    Args:
        max_tokens: that one stream alone may have waiting. Of n streams each may have the n-th
            part, whoever came first, and any stream a single Open.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._opens: deque[tuple[int, int, int]] = deque()  # event, stream, tokens
        self._tokens: Counter[int] = Counter()  # by stream, where there are any

    def fits(self, stream: int, num_tokens: int) -> bool:
        """Whether one more of so many tokens may wait."""
        if stream not in self._tokens:
            return True
        share = self._max_tokens // len(self._tokens)
        return self._tokens[stream] + max(num_tokens, SHORTEST_TOKENS) <= share

    def add(self, event: int, stream: int, num_tokens: int) -> None:
        num_tokens = max(num_tokens, SHORTEST_TOKENS)
        self._opens.append((event, stream, num_tokens))
        self._tokens[stream] += num_tokens

    def taken(self, event: int) -> None:
        """The engine thread has this event and all before it."""
        while self._opens and self._opens[0][0] <= event:
            _, stream, num_tokens = self._opens.popleft()
            self._tokens[stream] -= num_tokens
            if not self._tokens[stream]:
                del self._tokens[stream]
