"""Where a model multiplies by matrices that an adapter may add to."""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.models.linear.protocol import Linear


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """A Linear of a checkpoint's modules, output after output.

    modules: full name -> outputs; inputs: of all of them.
    """

    linear: Linear
    modules: Mapping[str, int]
    inputs: int
