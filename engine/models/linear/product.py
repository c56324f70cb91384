"""A product with one of the model's matrices, to which an adapter may add."""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.models.linear.protocol import Linear


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """A Linear that joins several modules of a checkpoint along the outputs.

    Attributes:
        modules: full name -> outputs.
        inputs: common to all modules.
    """

    linear: Linear
    modules: Mapping[str, int]
    inputs: int
