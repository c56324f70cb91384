"""Limits on peers' requests that the engine thread has not consumed yet, by stream.

A step may take long, while readers continue to send. The engine bounds the requests that it has
consumed. Before that this module bounds them by tokens, so that requests opened and cancelled
during one step do not pile up. Each stream has its share of the limit. Events are known only by
their number, in the order in which the engine consumes them.
"""

from collections import Counter, deque

MAX_TOKENS = 16 << 20
SHORTEST_TOKENS = 1024  # minimum that one request counts as, since it is a record too


class UnconsumedEvents:
    """The requests that wait, by stream. Transfer thread only.

    Args:
        max_tokens: limit for a stream that is alone. With n streams each has 1/n of it, in
            whichever order they came. A stream may always have a single Open.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._opens: deque[tuple[int, int, int]] = deque()  # event, stream, tokens
        self._tokens: Counter[int] = Counter()  # by stream, without zeros

    def fits(self, stream: int, num_tokens: int) -> bool:
        """Return whether one more request of so many tokens may wait."""
        if stream not in self._tokens:
            return True
        share = self._max_tokens // len(self._tokens)
        return self._tokens[stream] + max(num_tokens, SHORTEST_TOKENS) <= share

    def add(self, event: int, stream: int, num_tokens: int) -> None:
        num_tokens = max(num_tokens, SHORTEST_TOKENS)
        self._opens.append((event, stream, num_tokens))
        self._tokens[stream] += num_tokens

    def taken(self, event: int) -> None:
        """Record that the engine thread has consumed this event and all before it."""
        while self._opens and self._opens[0][0] <= event:
            _, stream, num_tokens = self._opens.popleft()
            self._tokens[stream] -= num_tokens
            if not self._tokens[stream]:
                del self._tokens[stream]
