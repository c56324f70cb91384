"""MXFP4: 4-bit floats (e2m1), two per byte, with a power of two per 32 inputs, as in gpt-oss.

Only experts are stored in this format, all experts of a layer in one tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.models.checkpoint import Checkpoint, TensorRequest
from engine.models.fields import Fields
from engine.models.linear import Matrix
from engine.models.quantized.protocol import Plain
from kernels.quantised import QuantFormat

_BLOCK = 32  # inputs per block, in 16 bytes
_BIAS = 127  # bias of exponents
MXFP4 = QuantFormat("fp4", _BLOCK)


@dataclass(frozen=True, slots=True)
class Mxfp4(Plain):
    """The scheme of all modules except experts. The storage of experts is declared separately."""

    name: str = "MXFP4 experts"
    format: QuantFormat | None = MXFP4


def mxfp4(config: Fields) -> Mxfp4:
    return Mxfp4()


def are_mxfp4(module: str, checkpoint: Checkpoint) -> bool:
    return f"{module}_blocks" in checkpoint.tensors


def wanted_mxfp4(module: str, count: int, rows: int, columns: int) -> Mapping[str, TensorRequest]:
    blocks = columns // _BLOCK
    return {
        f"{module}_blocks": TensorRequest((count, rows, blocks, _BLOCK // 2), dtypes=("U8",)),
        f"{module}_scales": TensorRequest((count, rows, blocks), dtypes=("U8",)),
    }


def read_mxfp4(module: str, number: int, checkpoint: Checkpoint) -> Matrix:
    """Return the matrix [rows, columns] of one expert."""
    packed = checkpoint.read(f"{module}_blocks")[number]
    exponents = checkpoint.read(f"{module}_scales")[number].int() - _BIAS
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    scales = torch.ldexp(torch.ones(exponents.shape), exponents).bfloat16()  # exact
    return Matrix(codes, MXFP4, scales)
