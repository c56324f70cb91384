"""The sigmoid gate of attention outputs."""

import torch
from torch import Tensor

from kernels import device


def gate_heads(x: Tensor, gate: Tensor) -> Tensor:
    """Return x * sigmoid(gate). The sigmoid is computed in float32, and rounded to x's dtype.

    Args:
        x: contiguous [num_tokens, heads * size].
        gate: [num_tokens, heads, size] of x's dtype, numbers of a head contiguous.
    Returns:
        [num_tokens, heads * size].
    Raises:
        ValueError: wrong shapes, strides or dtypes.
    """
    num_tokens, heads, size = gate.shape
    if x.shape != (num_tokens, heads * size) or gate.dtype != x.dtype:
        raise ValueError(f"gate {gate.dtype} {tuple(gate.shape)} does not fit x {tuple(x.shape)}")
    if not x.is_contiguous() or gate.stride(2) != 1:
        raise ValueError("x must be contiguous, and the numbers of a head of the gate")
    compiled = None if device.uses_triton(x) else device.compiled(x)
    return gate_heads_reference(x, gate) if compiled is None else compiled.gate_heads(x, gate)


def gate_heads_reference(x: Tensor, gate: Tensor) -> Tensor:
    return x * torch.sigmoid(gate.flatten(1))
