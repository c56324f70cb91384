"""Keys and values kept in 8 bits: floats of fp8, divided by a scale of their layer.

Source: Micikevicius et al., FP8 formats for deep learning, 2022.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

NARROW = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
# The first compute capability whose Triton has conversions of them.
FIRST_ARCHITECTURE = 89


@dataclass(frozen=True, slots=True)
class KVScales:
    """What keys and values are divided by when they are stored in 8 bits; elsewhere nothing."""

    key: float = 1.0
    value: float = 1.0

    def where(self, kept_in: torch.dtype) -> "KVScales":
        return self if kept_in in NARROW else UNSCALED


UNSCALED = KVScales()


def may_keep(kept_in: torch.dtype, computed_in: torch.dtype) -> bool:
    """Whether what is computed in the one may be kept in the other."""
    return kept_in == computed_in or kept_in in NARROW


def largest(dtype: torch.dtype) -> float:
    """Of a narrow dtype; 0 of another one, which kernels take for "as it is"."""
    return torch.finfo(dtype).max if dtype in NARROW else 0.0


def narrowed(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """x / scale in `dtype`, rounded to nearest; what is out of range becomes the largest, and NaN
    stays. x itself where dtype is not narrow."""
    if dtype not in NARROW:
        return x
    most = largest(dtype)
    return (x.float() / scale).clamp(-most, most).to(dtype)


def as_stored(x: Tensor) -> Tensor:
    """The same memory, as torch can index it: it has no such operations for numbers of 8 bits."""
    return x.view(torch.uint8) if x.dtype in NARROW else x


def widened(stored: Tensor, dtype: torch.dtype, computed_in: torch.dtype) -> Tensor:
    """Numbers of `dtype` that were read through `as_stored`, in the dtype that is computed in."""
    return stored.view(dtype).to(computed_in) if dtype in NARROW else stored


@triton.jit
def kept(x, scale, LARGEST: tl.constexpr):
    """`narrowed`, but for the rounding, which the store does."""
    if LARGEST > 0:
        x = x.to(tl.float32) / scale
        x = tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return x
