"""AWQ: each word has the numbers of eight outputs, in a special order."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from engine.models.checkpoint import FLOATS, Checkpoint, TensorRequest
from engine.models.fields import Fields
from engine.models.linear import Matrix
from engine.models.quantized.packed import as_stored, group_size, unpacked
from kernels.quantised import QuantFormat

_BITS = 4
_WORDS = 32 // _BITS
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # places of outputs 0 to 7 in their word


@dataclass(frozen=True, slots=True)
class Awq:
    group: int

    @property
    def name(self) -> str:
        return f"AWQ int4, groups of {self.group}"

    @property
    def format(self) -> QuantFormat:
        return QuantFormat("int4", max(self.group, 0))

    @property
    def ignored(self) -> frozenset[str]:
        return frozenset()

    @property
    def numbers(self) -> str:
        return ".qweight"

    def shape(self, module: str, checkpoint: Checkpoint) -> tuple[int, int]:
        columns, words = checkpoint.matrix_shape(f"{module}.qweight")
        return words * _WORDS, columns

    def wanted(
        self, module: str, rows: int, columns: int, checkpoint: Checkpoint
    ) -> Mapping[str, TensorRequest]:
        groups = columns // group_size(self.group, columns, module)
        return {
            f"{module}.qweight": TensorRequest((columns, rows // _WORDS), dtypes=("I32",)),
            f"{module}.qzeros": TensorRequest((groups, rows // _WORDS), dtypes=("I32",)),
            f"{module}.scales": TensorRequest((groups, rows), dtypes=FLOATS),
        }

    def matrix(self, module: str, rows: int, columns: int, checkpoint: Checkpoint) -> Matrix:
        numbers = _in_order(checkpoint.read(f"{module}.qweight")).t()
        zeros = _in_order(checkpoint.read(f"{module}.qzeros")).t()
        scales = checkpoint.read(f"{module}.scales").t()
        return as_stored(numbers, scales, zeros, self.format, None)


def _in_order(words: Tensor) -> Tensor:
    numbers = unpacked(words, _BITS)
    return numbers.view(len(words), -1, _WORDS)[:, :, _PLACES].view(len(words), -1)


def awq(config: Fields) -> Awq:
    if config.integer("bits", 4) != _BITS:
        raise config.wrong("bits", "4")
    version = "version" if "version" in config else "format"
    if config.text(version, "gemm").lower() != "gemm":
        raise config.wrong(version, "gemm")
    if not config.flag("zero_point", True):
        raise config.wrong("zero_point", "true")
    return Awq(config.group("group_size"))
