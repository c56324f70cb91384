"""The part of a model that a rank has."""

from dataclasses import dataclass
from typing import NamedTuple

from common.errors import ConfigError
from engine.ranks.group import Group


class ExpertPart(NamedTuple):
    """The experts of a layer that a rank has, and the inner numbers that it has of each."""

    experts: range
    inner: range


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """One of the `size` equal parts of a model.

    Attributes:
        group: the ranks with the other parts. None: there are none, or nothing is computed (a
            survey of the weights).
        whole_experts: a rank has some whole experts of each layer, not a part of every expert.
    """

    rank: int = 0
    size: int = 1
    group: Group | None = None
    whole_experts: bool = False

    def part(self, count: int, name: str) -> range:
        """Return this rank's part of `count` units that are split evenly.

        Args:
            name: of the units, for the error.
        Raises:
            ConfigError: the number of ranks does not divide `count`.
        """
        if count % self.size:
            raise ConfigError(
                f"engine.parallel.tp: {self.size} ranks cannot have equal parts of {count} {name}"
            )
        own = count // self.size
        return range(self.rank * own, (self.rank + 1) * own)

    def expert_part(self, count: int, inner: int) -> ExpertPart:
        """Return this rank's part of `count` experts. Raises ConfigError as `part`."""
        if self.whole_experts:
            return ExpertPart(self.part(count, "experts"), range(inner))
        return ExpertPart(range(count), self.part(inner, "inner numbers of experts"))


WHOLE = Share()
