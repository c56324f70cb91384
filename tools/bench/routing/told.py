"""What nodes could tell every router of what waits there, whoever sent it.

The product's routers are told so for refusals alone: to place requests by it does not pay, see
docs/routing.md.
"""

from collections.abc import Callable

from router.policy.load import Tally


class ToldTally(Tally):
    """A router's own tokens, and those of others that the nodes told of last, which are taken to be
    computed meanwhile.

    Args:
        tokens_per_s: that a node computes.
    """

    def __init__(self, clock: Callable[[], float], tokens_per_s: float) -> None:
        super().__init__()
        self._clock = clock
        self._tokens_per_s = tokens_per_s
        self._told: dict[str, tuple[int, float]] = {}

    def told(self, address: str, num_tokens: int) -> None:
        """So many wait there in all, now."""
        self._told[address] = (num_tokens - super().tokens(address), self._clock())

    def own(self, address: str) -> int:
        return super().tokens(address)

    def tokens(self, address: str) -> int:
        others, at = self._told.get(address, (0, 0.0))
        computed = int((self._clock() - at) * self._tokens_per_s)
        return super().tokens(address) + max(0, others - computed)
