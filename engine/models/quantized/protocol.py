"""The base of storage schemes of matrices, and the scheme without quantisation."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from common.errors import ConfigError
from engine.models.checkpoint import Checkpoint, TensorRequest
from engine.models.linear import Matrix
from engine.models.spec import NOT_QUANTISED
from kernels.quantised import QuantFormat


@dataclass(frozen=True, slots=True)
class MatrixLocation:
    """The location of a module's matrix [rows, columns] in a checkpoint."""

    checkpoint: Checkpoint
    module: str
    rows: int
    columns: int

    def has(self, name: str) -> bool:
        """Return whether the module has a tensor of this name, such as "weight_scale"."""
        return f"{self.module}.{name}" in self.checkpoint.tensors

    def read(self, name: str) -> Tensor:
        return self.checkpoint.read(f"{self.module}.{name}")

    def groups(self, size: int) -> int:
        """Return the number of groups of `size` inputs. A size of -1 means one group of all inputs.

        Raises:
            ConfigError: the number of inputs is not a multiple of the group size.
        """
        if size != -1 and self.columns % size:
            raise ConfigError(
                f"{self.module}: {self.columns} inputs do not divide into groups of {size}"
            )
        return 1 if size == -1 else self.columns // size


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
    def wanted(self, at: MatrixLocation) -> Mapping[str, TensorRequest]:
        """Return the module's tensors of a matrix, by their names in the module.

        Raises:
            ConfigError: this scheme does not store such a matrix.
        """

    @abstractmethod
    def matrix(self, at: MatrixLocation) -> Matrix:
        """Read the matrix. The tensors that `wanted` returns must exist."""


@dataclass(frozen=True, slots=True)
class Plain(Scheme):
    name: str = NOT_QUANTISED
    format: QuantFormat | None = None
    ignored: frozenset[str] = frozenset()
    numbers: str = ".weight"

    def wanted(self, at: MatrixLocation) -> Mapping[str, TensorRequest]:
        return {"weight": TensorRequest((at.rows, at.columns))}

    def matrix(self, at: MatrixLocation) -> Matrix:
        return Matrix(at.read("weight"))


PLAIN = Plain()


def wanted_by(scheme: Scheme, at: MatrixLocation) -> dict[str, TensorRequest]:
    """Return the tensors of a matrix in a scheme, by full name."""
    return {f"{at.module}.{name}": tensor for name, tensor in scheme.wanted(at).items()}


def storing(scheme: Scheme, module: str, checkpoint: Checkpoint) -> Scheme:
    """Return PLAIN for modules that are not quantised, otherwise `scheme`.

    The stored tensors decide. The list of such modules in a configuration would be patterns in many
    formats.
    """
    return PLAIN if checkpoint.has_floats(f"{module}.weight") else scheme
