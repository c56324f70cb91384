"""What the loader knows of a way to store matrices."""

from collections.abc import Mapping
from typing import Protocol

from engine.models.checkpoint import Checkpoint, Wanted
from engine.models.linear import Matrix


class Scheme(Protocol):
    """Frozen, of numbers: it is part of what a model is."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    @property
    def int8_channels(self) -> bool:
        """Whether its matrices are of int8 with a scale for each row."""
        ...

    @property
    def ignored(self) -> frozenset[str]:
        """Endings of names of tensors that may be there and are of no use."""
        ...

    @property
    def numbers(self) -> str:
        """Ending of the name of the tensor that a matrix's numbers are in."""
        ...

    def shape(self, module: str, checkpoint: Checkpoint) -> tuple[int, int]:
        """Rows and columns of a module's matrix, as its numbers have them. They are there."""
        ...

    def wanted(
        self, module: str, rows: int, columns: int, checkpoint: Checkpoint
    ) -> Mapping[str, Wanted]:
        """The tensors of a module's matrix [rows, columns], by name.

        Raises:
            ConfigError: this scheme does not store such a matrix.
        """
        ...

    def matrix(self, module: str, rows: int, columns: int, checkpoint: Checkpoint) -> Matrix:
        """Reads it. What `wanted` says is there."""
        ...


def storing(scheme: Scheme, plain: Scheme, module: str, checkpoint: Checkpoint) -> Scheme:
    """`plain` where the module is not quantised: lists of those in configurations are by pattern
    and of many kinds, and the stored tensors say the same."""
    return plain if checkpoint.has_floats(f"{module}.weight") else scheme
