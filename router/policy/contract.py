"""Interface of a routing policy."""

from collections.abc import Sequence
from typing import Protocol

from router.policy.choices import DecodeChoice, PlacementDecision, PlacementKey


class RoutingPolicy(Protocol):
    """A routing policy, called once per request on the router's event loop. Must not block.

    The choices may differ at each call, because nodes join and leave.
    """

    def pick(self, key: PlacementKey, choices: Sequence[DecodeChoice]) -> PlacementDecision:
        """Choose one of `choices`, which is never empty, and an order of its prefill nodes."""
        ...
