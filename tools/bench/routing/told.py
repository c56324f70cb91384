"""Queue reports of nodes to all routers, which cover the requests of every router.

The product's routers use these reports for refusals only. Placement by them brings no gain, see
docs/routing.md.
"""

from collections.abc import Callable

from router.policy.load import NodeTally


class ToldTally(NodeTally):
    """A tally of a router's own tokens and of other routers' tokens.

    The latter are those that the nodes last reported, less the tokens assumed to be computed since.

    Args:
        tokens_per_s: throughput of a node.
    """

    def __init__(self, clock: Callable[[], float], tokens_per_s: float) -> None:
        super().__init__()
        self._clock = clock
        self._tokens_per_s = tokens_per_s
        self._told: dict[str, tuple[int, float]] = {}

    def told(self, address: str, num_tokens: int) -> None:
        """Record that `num_tokens` wait at the node now."""
        self._told[address] = (num_tokens - super().tokens(address), self._clock())

    def own(self, address: str) -> int:
        return super().tokens(address)

    def tokens(self, address: str) -> int:
        others, at = self._told.get(address, (0, 0.0))
        computed = int((self._clock() - at) * self._tokens_per_s)
        return super().tokens(address) + max(0, others - computed)
