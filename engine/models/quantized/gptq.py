"""GPTQ: each word has the numbers of eight inputs, in groups of inputs that may be in any order."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.checkpoint import FLOATS, Checkpoint, TensorRequest
from engine.models.fields import Fields
from engine.models.linear import Matrix
from engine.models.quantized.packed import BITS, as_stored, group_size, unpacked
from kernels.quantised import QuantFormat


@dataclass(frozen=True, slots=True)
class Gptq:
    """Integers packed along the inputs, by groups.

    Attributes:
        zeros_less_one: whether zero points are stored minus one, as in the first version of the
            format.
        reordered: whether groups are not consecutive inputs.
    """

    bits: int
    group: int
    zeros_less_one: bool
    reordered: bool

    @property
    def name(self) -> str:
        return f"GPTQ int{self.bits}, groups of {self.group}"

    @property
    def format(self) -> QuantFormat | None:
        return QuantFormat("int4", max(self.group, 0), self.reordered) if self.bits == 4 else None

    @property
    def ignored(self) -> frozenset[str]:
        return frozenset()

    @property
    def numbers(self) -> str:
        return ".qweight"

    def shape(self, module: str, checkpoint: Checkpoint) -> tuple[int, int]:
        words, rows = checkpoint.matrix_shape(f"{module}.qweight")
        return rows, words * (32 // self.bits)

    def wanted(
        self, module: str, rows: int, columns: int, checkpoint: Checkpoint
    ) -> Mapping[str, TensorRequest]:
        words, groups = 32 // self.bits, columns // group_size(self.group, columns, module)
        tensors = {
            f"{module}.qweight": TensorRequest((columns // words, rows), dtypes=("I32",)),
            f"{module}.qzeros": TensorRequest((groups, rows // words), dtypes=("I32",)),
            f"{module}.scales": TensorRequest((groups, rows), dtypes=FLOATS),
        }
        order = f"{module}.g_idx"
        return tensors | (
            {order: TensorRequest((columns,), ("I32",))} if order in checkpoint.tensors else {}
        )

    def matrix(self, module: str, rows: int, columns: int, checkpoint: Checkpoint) -> Matrix:
        numbers = unpacked(checkpoint.read(f"{module}.qweight").t(), self.bits)
        zeros = unpacked(checkpoint.read(f"{module}.qzeros"), self.bits).t()
        if self.zeros_less_one:  # zero point 0 is stored as the largest number
            zeros = (zeros + 1) & (2**self.bits - 1)
        groups, scales = (
            self._groups(module, columns, checkpoint),
            checkpoint.read(f"{module}.scales").t(),
        )
        return as_stored(numbers, scales, zeros, self.format, groups)

    def _groups(self, module: str, columns: int, checkpoint: Checkpoint) -> Tensor | None:
        """Return the group of each input. None: groups are consecutive."""
        if f"{module}.g_idx" not in checkpoint.tensors:
            return None
        groups = checkpoint.read(f"{module}.g_idx")
        size = group_size(self.group, columns, module)
        consecutive = torch.arange(columns, dtype=torch.int32) // size
        return None if torch.equal(groups, consecutive) else groups


def gptq(config: Fields) -> Gptq:
    bits = config.integer("bits")
    if bits not in BITS:
        raise config.wrong("bits", "4 or 8")
    if "dynamic" in config:
        raise config.wrong("dynamic", "absent: all modules must be quantised alike")
    form = config.text("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise config.wrong("checkpoint_format", "gptq or gptq_v2")
    return Gptq(bits, config.group("group_size"), form == "gptq", config.flag("desc_act", False))
