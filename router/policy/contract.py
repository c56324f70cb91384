"""What every policy is to its caller."""

from collections.abc import Sequence
from typing import Protocol

from router.policy.choices import DecodeChoice, Placement, PlacementKey


class Policy(Protocol):
    """Called once per request, on the router's event loop; must not block.

    Nodes come and go: what is a choice now may be none at the next call.
    """

    def pick(self, key: PlacementKey, choices: Sequence[DecodeChoice]) -> Placement:
        """Takes one of `choices`, which is never empty, and an order of what it can read from."""
        ...
