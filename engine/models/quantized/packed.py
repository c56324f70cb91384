"""Small unsigned integers packed into 32-bit words, lowest bits first: GPTQ and AWQ.

These and compressed-tensors share the formula (number - zero) * scale, by groups of inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import ConfigError
from engine.models.checkpoint import FLOATS, Checkpoint, TensorRequest
from engine.models.fields import Fields
from engine.models.linear import Matrix
from engine.models.quantized.protocol import Scheme
from kernels.quantised import QuantFormat

BITS = (4, 8)  # sizes that do not cross bytes


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 [n, m] to uint8 [n, m * 32 / bits]."""
    numbers = words.contiguous().view(torch.uint8)
    if bits == 8:
        return numbers
    return torch.stack((numbers & 15, numbers >> 4), dim=-1).view(words.shape[0], -1)


def floats(numbers: Tensor, scale: Tensor, zero: Tensor, groups: Tensor | None) -> Tensor:
    """Return (number - zero) * scale.

    Args:
        numbers: [out, in].
        scale, zero: [out, groups].
        groups: [in], the group of each input. None: consecutive groups of equal size.
    Returns:
        float32 [out, in].
    """
    rows, num_groups = scale.shape
    if groups is None:
        grouped = numbers.reshape(rows, num_groups, -1).float()
        grouped.sub_(zero.float().unsqueeze(-1)).mul_(scale.float().unsqueeze(-1))
        return grouped.view(rows, -1)
    if int(groups.min()) < 0 or int(groups.max()) >= num_groups:
        raise ConfigError(f"an input belongs to a group outside [0, {num_groups})")
    wide = numbers.float().sub_(zero.float()[:, groups.long()])
    return wide.mul_(scale.float()[:, groups.long()])


def packed_matrix(
    numbers: Tensor, scale: Tensor, zero: Tensor, form: QuantFormat | None, groups: Tensor | None
) -> Matrix:
    """Return integers as they are if a format is given, otherwise as floats.

    Args:
        numbers: uint8 [out, in].
        scale, zero: [out, groups].
        groups: [in], the group of each input. None: consecutive groups of equal size.
    """
    order, columns = torch.empty(0), numbers.shape[1]
    if form is not None and form.reordered:
        groups = torch.arange(columns) // (form.group or columns) if groups is None else groups
        order = groups.argsort(stable=True)
        if not torch.equal(groups[order].long(), torch.arange(columns) // (form.group or columns)):
            form = None
    elif groups is not None:
        form = None
    if form is None:
        return Matrix(floats(numbers, scale, zero, groups))
    numbers = numbers[:, order] if form.reordered else numbers
    zeros = zero.to(torch.uint8).contiguous()
    return Matrix(numbers, form, scale.float().contiguous(), zeros, order)


def group_size(size: int, columns: int, module: str) -> int:
    """Return the number of inputs per group. A size of -1 means one group of all inputs.

    Raises:
        ConfigError: the number of inputs is not a multiple of the group size.
    """
    if size == -1:
        return columns
    if columns % size:
        raise ConfigError(f"{module}: {columns} inputs do not divide into groups of {size}")
    return size


@dataclass(frozen=True, slots=True)
class Gptq(Scheme):
    """Each word has the numbers of eight inputs, in groups of inputs that may be in any order.

    Attributes:
        zeros_less_one: whether zero points are stored minus one, as in the first version of the
            format.
        reordered: whether groups are not consecutive inputs.
    """

    bits: int
    group: int
    zeros_less_one: bool
    reordered: bool
    numbers = ".qweight"

    @property
    def name(self) -> str:
        return f"GPTQ int{self.bits}, groups of {self.group}"

    @property
    def format(self) -> QuantFormat | None:
        return QuantFormat("int4", max(self.group, 0), self.reordered) if self.bits == 4 else None

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
        scales = checkpoint.read(f"{module}.scales").t()
        groups = self._groups(module, columns, checkpoint)
        return packed_matrix(numbers, scales, zeros, self.format, groups)

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


_AWQ_BITS = 4
_AWQ_WORDS = 32 // _AWQ_BITS
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # places of outputs 0 to 7 in their word


@dataclass(frozen=True, slots=True)
class Awq(Scheme):
    """Each word has the numbers of eight outputs, in a special order."""

    group: int
    numbers = ".qweight"

    @property
    def name(self) -> str:
        return f"AWQ int4, groups of {self.group}"

    @property
    def format(self) -> QuantFormat:
        return QuantFormat("int4", max(self.group, 0))

    def shape(self, module: str, checkpoint: Checkpoint) -> tuple[int, int]:
        columns, words = checkpoint.matrix_shape(f"{module}.qweight")
        return words * _AWQ_WORDS, columns

    def wanted(
        self, module: str, rows: int, columns: int, checkpoint: Checkpoint
    ) -> Mapping[str, TensorRequest]:
        groups = columns // group_size(self.group, columns, module)
        return {
            f"{module}.qweight": TensorRequest((columns, rows // _AWQ_WORDS), dtypes=("I32",)),
            f"{module}.qzeros": TensorRequest((groups, rows // _AWQ_WORDS), dtypes=("I32",)),
            f"{module}.scales": TensorRequest((groups, rows), dtypes=FLOATS),
        }

    def matrix(self, module: str, rows: int, columns: int, checkpoint: Checkpoint) -> Matrix:
        numbers = _awq_numbers(checkpoint.read(f"{module}.qweight")).t()
        zeros = _awq_numbers(checkpoint.read(f"{module}.qzeros")).t()
        scales = checkpoint.read(f"{module}.scales").t()
        return packed_matrix(numbers, scales, zeros, self.format, None)


def _awq_numbers(words: Tensor) -> Tensor:
    numbers = unpacked(words, _AWQ_BITS)
    return numbers.view(len(words), -1, _AWQ_WORDS)[:, :, _AWQ_PLACES].view(len(words), -1)


def awq(config: Fields) -> Awq:
    if config.integer("bits", 4) != _AWQ_BITS:
        raise config.wrong("bits", "4")
    version = "version" if "version" in config else "format"
    if config.text(version, "gemm").lower() != "gemm":
        raise config.wrong(version, "gemm")
    if not config.flag("zero_point", True):
        raise config.wrong("zero_point", "true")
    return Awq(config.group("group_size"))
