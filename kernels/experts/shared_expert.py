"""The sum of the routed experts and of a shared expert whose output is gated."""

import torch
from torch import Tensor

from kernels import device


def add_gated(y: Tensor, x: Tensor, gates: Tensor) -> Tensor:
    """Return y + x * sigmoid(gates).

    Args:
        y, x: contiguous [n, hidden].
        gates: contiguous [n, 1].
    Returns:
        [n, hidden], all of one dtype.
    Raises:
        ValueError: wrong shapes or strides.
    """
    if x.shape != y.shape or gates.shape != (len(y), 1):
        raise ValueError(f"y {tuple(y.shape)}, x {tuple(x.shape)}, gates {tuple(gates.shape)}")
    if not (y.is_contiguous() and x.is_contiguous() and gates.is_contiguous()):
        raise ValueError("all arguments must be contiguous")
    compiled = None if device.uses_triton(y) else device.compiled(y)
    return add_gated_reference(y, x, gates) if compiled is None else compiled.add_gated(y, x, gates)


def add_gated_reference(y: Tensor, x: Tensor, gates: Tensor) -> Tensor:
    return torch.addcmul(y, x, torch.sigmoid(gates))
