"""The protocol of a storage scheme of matrices, and the scheme without quantisation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from engine.models.checkpoint import Checkpoint, TensorRequest
from engine.models.linear import Matrix
from engine.models.spec import NOT_QUANTISED
from kernels.quantised import QuantFormat


class Scheme(Protocol):
    """A storage scheme. Immutable and made of numbers, because it is part of the fingerprint."""

    @property
    def name(self) -> str:
        """Name for messages."""
        ...

    @property
    def format(self) -> QuantFormat | None:
        """The format in which products use the stored matrices directly. None: `matrix` returns
        floats."""
        ...

    @property
    def ignored(self) -> frozenset[str]:
        """Suffixes of tensor names that may exist and are not used."""
        ...

    @property
    def numbers(self) -> str:
        """Suffix of the name of the tensor with a matrix's numbers."""
        ...

    def shape(self, module: str, checkpoint: Checkpoint) -> tuple[int, int]:
        """Return rows and columns of a module's matrix, based on its tensor of numbers, which must
        exist."""
        ...

    def wanted(
        self, module: str, rows: int, columns: int, checkpoint: Checkpoint
    ) -> Mapping[str, TensorRequest]:
        """Return the tensors of a module's matrix [rows, columns], by name.

        Raises:
            ConfigError: this scheme does not store such a matrix.
        """
        ...

    def matrix(self, module: str, rows: int, columns: int, checkpoint: Checkpoint) -> Matrix:
        """Read the matrix. The tensors that `wanted` returns must exist."""
        ...


def storing(scheme: Scheme, plain: Scheme, module: str, checkpoint: Checkpoint) -> Scheme:
    """Return `plain` for modules that are not quantised, otherwise `scheme`.

    The stored tensors decide. The list of such modules in a configuration would be patterns in many
    formats.
    """
    return plain if checkpoint.has_floats(f"{module}.weight") else scheme


@dataclass(frozen=True, slots=True)
class Plain:
    name: str = NOT_QUANTISED
    format: QuantFormat | None = None
    ignored: frozenset[str] = frozenset()
    numbers: str = ".weight"

    def shape(self, module: str, checkpoint: Checkpoint) -> tuple[int, int]:
        return checkpoint.matrix_shape(f"{module}.weight")

    def wanted(
        self, module: str, rows: int, columns: int, checkpoint: Checkpoint
    ) -> Mapping[str, TensorRequest]:
        return {f"{module}.weight": TensorRequest((rows, columns))}

    def matrix(self, module: str, rows: int, columns: int, checkpoint: Checkpoint) -> Matrix:
        return Matrix(checkpoint.read(f"{module}.weight"))


PLAIN = Plain()
