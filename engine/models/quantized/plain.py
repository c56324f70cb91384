"""Unquantised matrices."""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.models.checkpoint import Checkpoint, TensorRequest
from engine.models.linear import Matrix
from engine.models.spec import NOT_QUANTISED
from kernels.quantised import QuantFormat


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
