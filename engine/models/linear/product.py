"""A product with one of the model's matrices, to which an adapter may add."""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.models.linear.part import MatrixPart
from engine.models.linear.protocol import Linear


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """A Linear that joins several modules of a checkpoint along the outputs.

    Attributes:
        parts: full name of a module -> its part on this rank.
    """

    linear: Linear
    parts: Mapping[str, MatrixPart]

    @property
    def modules(self) -> Mapping[str, int]:
        """Outputs on this rank by the module's full name."""
        return {name: part.num_outputs for name, part in self.parts.items()}

    @property
    def inputs(self) -> int:
        """Inputs on this rank, common to all modules."""
        return len(next(iter(self.parts.values())).inputs)
