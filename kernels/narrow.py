"""Storage of keys and values in 8 bits: fp8 numbers, divided by a scale of their layer.

Source: Micikevicius et al., FP8 formats for deep learning, 2022.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

NARROW = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
# The first compute capability for which Triton converts these formats.
FIRST_ARCHITECTURE = 89


@dataclass(frozen=True, slots=True)
class KVScales:
    """The divisors of keys and values stored in 8 bits. Unused for other dtypes."""

    key: float = 1.0
    value: float = 1.0

    def where(self, kept_in: torch.dtype) -> "KVScales":
        return self if kept_in in NARROW else UNSCALED


UNSCALED = KVScales()


def may_keep(kept_in: torch.dtype, computed_in: torch.dtype) -> bool:
    """Return whether results in the compute dtype may be stored in `kept_in`."""
    return kept_in == computed_in or kept_in in NARROW


def largest(dtype: torch.dtype) -> float:
    """Return the largest number of a narrow dtype. 0: the dtype is not narrow."""
    return torch.finfo(dtype).max if dtype in NARROW else 0.0


def narrowed(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return x / scale in `dtype`, rounded to nearest. Values out of range become the largest
    number, and NaN stays NaN. Returns x itself if dtype is not narrow."""
    if dtype not in NARROW:
        return x
    most = largest(dtype)
    return (x.float() / scale).clamp(-most, most).to(dtype)


def as_stored(x: Tensor) -> Tensor:
    """View the same memory in a dtype that torch can index: it cannot index 8-bit floats."""
    return x.view(torch.uint8) if x.dtype in NARROW else x


def widened(stored: Tensor, dtype: torch.dtype, computed_in: torch.dtype) -> Tensor:
    """Return numbers of `dtype`, read through `as_stored`, in the compute dtype."""
    return stored.view(dtype).to(computed_in) if dtype in NARROW else stored


@triton.jit
def kept(x, scale, LARGEST: tl.constexpr):
    """Apply `narrowed` without the rounding, which the store does."""
    if LARGEST > 0:
        x = x.to(tl.float32) / scale
        x = tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return x
