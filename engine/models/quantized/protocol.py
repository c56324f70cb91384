"""The base of storage schemes of matrices, and the scheme without quantisation."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from engine.models.checkpoint import Checkpoint, TensorRequest
from engine.models.linear import Matrix
from engine.models.spec import NOT_QUANTISED
from kernels.quantised import QuantFormat


class Scheme(ABC):
    """A storage scheme. Immutable and made of numbers, because it is part of the fingerprint.

    Attributes:
        ignored: suffixes of tensor names that may exist and are not used.
        numbers: suffix of the name of the tensor with a matrix's numbers.
    """

    __slots__ = ()
    ignored: frozenset[str] = frozenset()
    numbers: str = ".weight"

    @property
    @abstractmethod
    def name(self) -> str:
        """Name for messages."""

    @property
    @abstractmethod
    def format(self) -> QuantFormat | None:
        """The format in which products use the stored matrices directly. None: `matrix` returns
        floats."""

    def shape(self, module: str, checkpoint: Checkpoint) -> tuple[int, int]:
        """Return rows and columns of a module's matrix, based on its tensor of numbers, which must
        exist."""
        return checkpoint.matrix_shape(module + self.numbers)

    @abstractmethod
    def wanted(
        self, module: str, rows: int, columns: int, checkpoint: Checkpoint
    ) -> Mapping[str, TensorRequest]:
        """Return the tensors of a module's matrix [rows, columns], by name.

        Raises:
            ConfigError: this scheme does not store such a matrix.
        """

    @abstractmethod
    def matrix(self, module: str, rows: int, columns: int, checkpoint: Checkpoint) -> Matrix:
        """Read the matrix. The tensors that `wanted` returns must exist."""


@dataclass(frozen=True, slots=True)
class Plain(Scheme):
    name: str = NOT_QUANTISED
    format: QuantFormat | None = None
    ignored: frozenset[str] = frozenset()
    numbers: str = ".weight"

    def wanted(
        self, module: str, rows: int, columns: int, checkpoint: Checkpoint
    ) -> Mapping[str, TensorRequest]:
        return {f"{module}.weight": TensorRequest((rows, columns))}

    def matrix(self, module: str, rows: int, columns: int, checkpoint: Checkpoint) -> Matrix:
        return Matrix(checkpoint.read(f"{module}.weight"))


PLAIN = Plain()


def storing(scheme: Scheme, module: str, checkpoint: Checkpoint) -> Scheme:
    """Return PLAIN for modules that are not quantised, otherwise `scheme`.

    The stored tensors decide. The list of such modules in a configuration would be patterns in many
    formats.
    """
    return PLAIN if checkpoint.has_floats(f"{module}.weight") else scheme
