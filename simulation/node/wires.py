"""The condition of the network between two nodes. Only simulations with faults change it."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wire:
    """The condition of one direction between two processes.

    Attributes:
        factor: of all delays and of the duration of reads.
        is_cut: connections end, and new ones are refused.
        is_silent: packets vanish, and no process is informed.
    """

    factor: float = 1.0
    is_cut: bool = False
    is_silent: bool = False

    def __or__(self, other: "Wire") -> "Wire":
        """Return the condition under both faults."""
        return Wire(
            self.factor * other.factor,
            self.is_cut or other.is_cut,
            self.is_silent or other.is_silent,
        )


HEALTHY = Wire()
# Returns the condition between this node and the one at an address.
WireTo = Callable[[str], Wire]


def healthy(address: str) -> Wire:
    """Return the condition of a network without faults."""
    return HEALTHY
