"""From where the KV of prompts comes that are this node's to compute: from its own cache, from
another node's, or it is computed; and what a token takes that is.
"""

import math

from common.queueing.drain import Drain
from common.queueing.waiting_line import Place
from engine.batch.request import Request


class Ways:
    """Engine thread only."""

    def __init__(self) -> None:
        self._computing = Drain()  # admitted: tokens that no cache had
        self._tokens = dict.fromkeys(("own", "fetched", "computed"), 0)

    @property
    def token_s(self) -> float:
        """Seconds that a computed token takes; 0.0: not known yet."""
        return self._computing.unit_s

    def counters(self) -> dict[str, int]:
        return {f"prompt_token_ways/{way}": number for way, number in self._tokens.items()}

    def admitted(self, request: Request, fetched_tokens: int, now: float) -> None:
        """Its turn has come.

        Args:
            fetched_tokens: that were read for it. Of these, what is still cached counts.
        """
        cached = request.cached_tokens
        fetched, computed = min(fetched_tokens, cached), len(request.token_ids) - cached
        self._tokens["own"] += cached - fetched
        self._tokens["fetched"] += fetched
        self._tokens["computed"] += computed
        self._computing.leave(request.key)
        self._computing.join(request.key, Place(-math.inf, computed), now)

    def computed(self, key: int, num_left: int) -> None:
        """A chunk of it is done, and so many of its tokens are left."""
        self._computing.serve(key, num_left)

    def tick(self, now: float) -> None:
        """What was computed since the last call took until now."""
        self._computing.tick(now)

    def ended(self, key: int) -> None:
        """Harmless where it was never admitted."""
        self._computing.leave(key)
