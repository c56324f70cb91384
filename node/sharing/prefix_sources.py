"""The sources of the KV of prompts that this node is to compute: its own cache, another node's, or
computation. Also the time of a computed token.
"""

import math

from common.queueing import QueueEntry, QueueEstimator
from engine.batch.request import Request


class PrefixSources:
    """Counters by source. Engine thread only."""

    def __init__(self) -> None:
        self._computing = QueueEstimator()  # admitted requests, by tokens that no cache had
        self._tokens = dict.fromkeys(("own", "fetched", "computed"), 0)

    @property
    def token_s(self) -> float:
        """Return the seconds that a computed token takes. 0.0: unknown."""
        return self._computing.unit_s

    def counters(self) -> dict[str, int]:
        return {f"prompt_token_ways/{way}": number for way, number in self._tokens.items()}

    def admitted(self, request: Request, fetched_tokens: int, now: float) -> None:
        """Record an admitted request.

        Args:
            fetched_tokens: read for it. Only those that are still cached count.
        """
        cached = request.cached_tokens
        fetched, computed = min(fetched_tokens, cached), len(request.token_ids) - cached
        self._tokens["own"] += cached - fetched
        self._tokens["fetched"] += fetched
        self._tokens["computed"] += computed
        self._computing.leave(request.key)
        self._computing.join(request.key, QueueEntry(-math.inf, computed), now)

    def computed(self, key: int, num_left: int) -> None:
        """Record a finished chunk of a request, with num_left tokens remaining."""
        self._computing.serve(key, num_left)

    def tick(self, now: float) -> None:
        """Update the service time of tokens computed since the last call."""
        self._computing.tick(now)

    def ended(self, key: int) -> None:
        """Remove an ended request. Harmless if it was never admitted."""
        self._computing.leave(key)
