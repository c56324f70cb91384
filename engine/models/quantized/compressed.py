"""compressed-tensors, written by llm-compressor: fp8, int8 per channel, int4 and int8 by group.

All quantised modules must have the same scheme. Checkpoints with several schemes are rejected.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.models.checkpoint import FLOATS, Checkpoint, TensorRequest
from engine.models.fields import Fields
from engine.models.linear import INT8, Matrix
from engine.models.quantized.fp8 import Fp8, block_of
from engine.models.quantized.packed import BITS, packed_matrix, unpacked
from engine.models.quantized.protocol import MatrixLocation, Scheme
from kernels.quantised import QuantFormat

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
