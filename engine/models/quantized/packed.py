"""Small unsigned integers packed into 32-bit words, lowest bits first: GPTQ, AWQ and
compressed-tensors. They share the formula (number - zero) * scale, by groups of inputs.

compressed-tensors, written by llm-compressor, also has fp8, and int8 per channel. All quantised
modules must have the same scheme. Checkpoints with several schemes are rejected.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import ConfigError
from engine.models.checkpoint import FLOATS, Checkpoint, TensorRequest
from engine.models.fields import Fields
from engine.models.linear import INT8, Matrix
from engine.models.quantized.fp8 import Fp8, block_of
from engine.models.quantized.protocol import MatrixLocation, Scheme
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

    def wanted(self, at: MatrixLocation) -> Mapping[str, TensorRequest]:
        words, groups = 32 // self.bits, at.groups(self.group)
        tensors = {
            "qweight": TensorRequest((at.columns // words, at.rows), dtypes=("I32",)),
            "qzeros": TensorRequest((groups, at.rows // words), dtypes=("I32",)),
            "scales": TensorRequest((groups, at.rows), dtypes=FLOATS),
        }
        if at.has("g_idx"):
            tensors["g_idx"] = TensorRequest((at.columns,), ("I32",))
        return tensors

    def matrix(self, at: MatrixLocation) -> Matrix:
        numbers = unpacked(at.read("qweight").t(), self.bits)
        zeros = unpacked(at.read("qzeros"), self.bits).t()
        if self.zeros_less_one:  # zero point 0 is stored as the largest number
            zeros = (zeros + 1) & (2**self.bits - 1)
        return packed_matrix(
            numbers, at.read("scales").t(), zeros, self.format, self._input_groups(at)
        )

    def _input_groups(self, at: MatrixLocation) -> Tensor | None:
        """Return the group of each input. None: groups are consecutive."""
        if not at.has("g_idx"):
            return None
        size = at.columns // at.groups(self.group)
        consecutive = torch.arange(at.columns, dtype=torch.int32) // size
        groups = at.read("g_idx")
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

    def wanted(self, at: MatrixLocation) -> Mapping[str, TensorRequest]:
        words, groups = at.rows // _AWQ_WORDS, at.groups(self.group)
        return {
            "qweight": TensorRequest((at.columns, words), dtypes=("I32",)),
            "qzeros": TensorRequest((groups, words), dtypes=("I32",)),
            "scales": TensorRequest((groups, at.rows), dtypes=FLOATS),
        }

    def matrix(self, at: MatrixLocation) -> Matrix:
        numbers, zeros = (_awq_numbers(at.read(name)).t() for name in ("qweight", "qzeros"))
        return packed_matrix(numbers, at.read("scales").t(), zeros, self.format, None)


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


_ACTIVATIONS = frozenset({".input_scale", ".input_zero_point", ".k_scale", ".v_scale"})


@dataclass(frozen=True, slots=True)
class Int8Stored(Scheme):
    """int8 with a scale per row, symmetric around zero."""

    name: str = "int8 by channel"
    format: QuantFormat = INT8
    ignored = _ACTIVATIONS  # not a field: the order of a set would make fingerprints differ

    def wanted(self, at: MatrixLocation) -> Mapping[str, TensorRequest]:
        rows = at.rows
        return {
            "weight": TensorRequest((rows, at.columns), dtypes=("I8",)),
            "weight_scale": TensorRequest((rows, 1), FLOATS, ((rows,), (1,), ())),
        }

    def matrix(self, at: MatrixLocation) -> Matrix:
        scales = at.read("weight_scale").float().reshape(-1, 1)
        return Matrix(at.read("weight"), INT8, scales.expand(at.rows, 1).contiguous())


@dataclass(frozen=True, slots=True)
class CompressedTensor(Scheme):
    """Integers packed along the inputs, in groups of inputs.

    They are centred on half of their range, or on a zero point.

    Attributes:
        group: inputs per group. -1: one group.
        reordered: whether groups are not consecutive inputs.
    """

    bits: int
    group: int
    symmetric: bool
    reordered: bool
    ignored = _ACTIVATIONS | {".weight_shape"}  # the model's own shape is equivalent
    numbers = ".weight_packed"

    @property
    def name(self) -> str:
        groups = "by channel" if self.group == -1 else f"groups of {self.group}"
        return f"packed int{self.bits}, {groups}"

    @property
    def format(self) -> QuantFormat | None:
        return QuantFormat("int4", max(self.group, 0), self.reordered) if self.bits == 4 else None

    def shape(self, module: str, checkpoint: Checkpoint) -> tuple[int, int]:
        rows, words = checkpoint.matrix_shape(f"{module}.weight_packed")
        columns = words * (32 // self.bits)
        if f"{module}.weight_shape" in checkpoint.tensors:  # the last words may be partial
            columns = int(checkpoint.read(f"{module}.weight_shape")[-1])
        return rows, columns

    def wanted(self, at: MatrixLocation) -> Mapping[str, TensorRequest]:
        words, groups = 32 // self.bits, at.groups(self.group)
        tensors = {
            "weight_packed": TensorRequest((at.rows, -(-at.columns // words)), dtypes=("I32",)),
            "weight_scale": TensorRequest((at.rows, groups), dtypes=FLOATS),
        }
        if not self.symmetric:
            zeros = TensorRequest((-(-at.rows // words), groups), dtypes=("I32",))
            tensors["weight_zero_point"] = zeros
        if at.has("weight_g_idx"):
            tensors["weight_g_idx"] = TensorRequest((at.columns,), dtypes=("I32", "I64"))
        return tensors

    def matrix(self, at: MatrixLocation) -> Matrix:
        scale = at.read("weight_scale")
        zeros = torch.full_like(scale, 2 ** (self.bits - 1))
        if not self.symmetric:
            words = at.read("weight_zero_point").t()
            zeros = unpacked(words, self.bits).t()[: at.rows]
        groups = at.read("weight_g_idx") if at.has("weight_g_idx") else None
        numbers = unpacked(at.read("weight_packed"), self.bits)[:, : at.columns]
        return packed_matrix(numbers, scale, zeros, self.format, groups)


def compressed_tensors(config: Fields) -> Scheme:
    for name in ("sparsity_config", "transform_config"):
        if name in config and config.nested(name).size:
            raise config.wrong(name, "absent")
    groups = config.nested("config_groups").objects()
    if len(groups) != 1:
        raise config.wrong("config_groups", "one group: all modules must be quantised alike")
    (group,) = groups
    form = group.text("format", config.text("format"))
    weights = group.nested("weights")
    bits, strategy = weights.integer("num_bits"), weights.text("strategy")
    match form, weights.text("type", "int"):
        case (("float-quantized" | "naive-quantized"), "float") if bits == 8:
            return _float(weights, strategy)
        case (("int-quantized" | "naive-quantized"), "int") if bits == 8:
            if strategy not in ("channel", "tensor"):
                raise weights.wrong("strategy", "channel or tensor")
            if not weights.flag("symmetric", True):
                raise weights.wrong("symmetric", "true")
            return Int8Stored()
        case "pack-quantized", "int" if bits in BITS:
            if strategy not in ("channel", "group"):
                raise weights.wrong("strategy", "channel or group")
            size = weights.group("group_size") if strategy == "group" else -1
            order = "" if weights.is_null("actorder") else weights.text("actorder", "")
            return CompressedTensor(bits, size, weights.flag("symmetric", True), order == "group")
    raise config.wrong(
        "format",
        "float-quantized or int-quantized of 8 bits, or pack-quantized of 4 or 8",
    )


def _float(weights: Fields, strategy: str) -> Fp8:
    if strategy == "block":
        return Fp8(block_of(weights, "block_structure"))
    if strategy not in ("channel", "tensor"):
        raise weights.wrong("strategy", "channel, tensor or block")
    return Fp8(None)
