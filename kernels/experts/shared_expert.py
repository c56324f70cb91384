"""The sum of the routed experts and of a shared expert whose output is gated."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import device
from kernels.bound import bound
from kernels.layers.linear import linear

MAX_BLOCK = 4096  # columns that a program keeps in registers


def add_gated(y: Tensor, shared: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return y + shared * sigmoid(x weight). The product with the weight is rounded to x's dtype.

    Args:
        y, shared, x: contiguous [n, hidden].
        weight: contiguous [1, hidden].
    Returns:
        [n, hidden], all of one dtype.
    Raises:
        ValueError: wrong shapes or strides.
    """
    if not y.shape == shared.shape == x.shape or weight.shape != (1, *x.shape[1:]):
        shapes = tuple(tuple(given.shape) for given in (y, shared, x, weight))
        raise ValueError(f"three [n, hidden] and [1, hidden] expected, got {shapes}")
    if not all(given.is_contiguous() for given in (y, shared, x, weight)):
        raise ValueError("all arguments must be contiguous")
    if device.uses_triton(y):
        return add_gated_triton(y, shared, x, weight)
    compiled, gates = device.compiled(y), linear(x, weight)
    if compiled is not None:
        return compiled.add_gated(y, shared, gates)
    return torch.addcmul(y, shared, torch.sigmoid(gates))


def add_gated_triton(y: Tensor, shared: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    out = torch.empty_like(y)
    n, hidden = y.shape
    if out.numel():
        _add_gated_kernel[(n,)](
            y,
            shared,
            x,
            weight,
            out,
            hidden,
            min(MAX_BLOCK, triton.next_power_of_2(hidden)),
            num_warps=4,
            enable_fp_fusion=True,
        )
    return out


@bound
@triton.jit
def _add_gated_kernel(
    y_ptr, shared_ptr, x_ptr, weight_ptr, out_ptr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute one row."""
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    col = tl.arange(0, BLOCK)
    products = tl.zeros([BLOCK], tl.float32)
    for start in tl.static_range(0, HIDDEN, BLOCK):
        mask = start + col < HIDDEN
        x = tl.load(x_ptr + row + start + col, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + start + col, mask=mask, other=0.0).to(tl.float32)
        products += x * weight
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    gate = tl.sigmoid(tl.sum(products).to(dtype).to(tl.float32))
    for start in tl.static_range(0, HIDDEN, BLOCK):
        mask = start + col < HIDDEN
        places = row + start + col
        y = tl.load(y_ptr + places, mask=mask, other=0.0).to(tl.float32)
        shared = tl.load(shared_ptr + places, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + places, y + shared * gate, mask=mask)
