"""Residual addition and RMSNorm, rounded at the same points as in Hugging Face's models."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import device, early_launch
from kernels.bound import bound

MAX_BLOCK = 8192  # columns that a program keeps in registers. Wider rows are read twice


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    *,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (norm(x + residual) * weight, x + residual).

    The sum is rounded to x's dtype, normed in float32, rounded to weight's dtype, multiplied by
    weight and rounded to x's dtype. A float32 weight therefore avoids one rounding.

    Args:
        x: [n, hidden], rows may be strided.
        residual: of x's shape and dtype. None: nothing is added, and without `rows` the returned
            sum is x itself.
        weight: contiguous [hidden], of x's dtype or float32.
        rows: int64 [m], the only rows of x and residual to use. None: all, in order.
    Returns:
        Two tensors [n, hidden], or [m, hidden] with `rows`, of x's dtype.
    Raises:
        ValueError: wrong shapes, strides or dtypes.
    """
    if x.ndim != 2 or weight.shape != x.shape[1:]:
        raise ValueError(
            f"[n, hidden] and [hidden] expected, got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        raise ValueError(f"residual {_describe(residual)} is not like x {_describe(x)}")
    if weight.dtype not in (x.dtype, torch.float32):
        raise ValueError(f"weight: {x.dtype} or float32 expected, got {weight.dtype}")
    if any(given is not None and given.stride(-1) != 1 for given in (x, residual, weight)):
        raise ValueError("columns must be contiguous; only rows may be strided")
    if rows is not None and (rows.ndim != 1 or rows.dtype != torch.int64):
        raise ValueError(f"rows: int64 [m] expected, got {_describe(rows)}")
    if device.uses_triton(x):
        return add_rms_norm_triton(x, residual, weight, eps, rows)
    if (compiled := device.compiled(x)) is not None:
        return compiled.add_rms_norm(x, residual, weight, eps, rows)
    return add_rms_norm_reference(x, residual, weight, eps, rows)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, rows: Tensor | None
) -> tuple[Tensor, Tensor]:
    if rows is not None:
        x = x.index_select(0, rows)
        residual = None if residual is None else residual.index_select(0, rows)
    total = x if residual is None else residual + x
    return rms_norm_reference(total, weight, eps), total


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm over the last dimension, for x of any rank."""
    wide = x.float()
    mean_square = wide.square().mean(-1, keepdim=True)
    normed = (wide * torch.rsqrt(mean_square + eps)).to(weight.dtype)
    return (normed * weight).to(x.dtype)


def add_rms_norm_triton(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, rows: Tensor | None
) -> tuple[Tensor, Tensor]:
    hidden = x.shape[1]
    num_rows = x.shape[0] if rows is None else rows.shape[0]
    normed = torch.empty(num_rows, hidden, dtype=x.dtype, device=x.device)
    is_x = residual is None and rows is None
    total = x if is_x else torch.empty_like(normed)
    if normed.numel():
        block = min(MAX_BLOCK, triton.next_power_of_2(hidden))
        early = early_launch.launches_early()
        _add_rms_norm_kernel[(num_rows,)](
            x,
            residual,
            weight,
            rows,
            normed,
            None if is_x else total,
            x.stride(0),
            x.stride(0) if residual is None else residual.stride(0),
            eps,
            hidden,
            block,
            early,
            launch_pdl=early,
            num_warps=_num_warps(block, x.element_size()),
            enable_fp_fusion=True,
        )
    return normed, total


def _num_warps(block: int, element_size: int) -> int:
    """Return warps for 16 bytes per thread, at most 16. To be tuned with tools/bench/gpu."""
    return max(1, min(16, block * element_size // (16 * 32)))


@bound
@triton.jit(do_not_specialize=["rows_ptr"])
def _add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    rows_ptr,
    normed_ptr,
    total_ptr,
    x_stride,
    residual_stride,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute one row of the results. Pointers that are None are not compiled in."""
    early_launch.start(EARLY)
    place = tl.program_id(0).to(tl.int64)
    row = place
    if rows_ptr is not None:
        row = tl.load(rows_ptr + place)
    x_ptr += row * x_stride
    if residual_ptr is not None:
        residual_ptr += row * residual_stride
    normed_ptr += place * HIDDEN
    if total_ptr is not None:
        total_ptr += place * HIDDEN
    col = tl.arange(0, BLOCK)
    if HIDDEN <= BLOCK:
        mask = col < HIDDEN
        total = _sum(x_ptr, residual_ptr, total_ptr, col, mask)
        # Loaded before the reduction waits.
        weight = tl.load(weight_ptr + col, mask=mask, other=0.0)
        scale = tl.rsqrt(tl.sum(total * total) / HIDDEN + eps)
        tl.store(normed_ptr + col, weighted(total * scale, weight), mask=mask)
    else:
        squares = tl.zeros([BLOCK], tl.float32)
        for start in range(0, HIDDEN, BLOCK):
            columns = start + col
            total = _sum(x_ptr, residual_ptr, total_ptr, columns, columns < HIDDEN)
            squares += total * total
        scale = tl.rsqrt(tl.sum(squares) / HIDDEN + eps)
        for start in range(0, HIDDEN, BLOCK):
            columns = start + col
            mask = columns < HIDDEN
            # Added again, because a thread may not rely on the recent stores of others.
            total = _sum(x_ptr, residual_ptr, None, columns, mask)
            weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
            tl.store(normed_ptr + columns, weighted(total * scale, weight), mask=mask)


@triton.jit
def _sum(x_ptr, residual_ptr, total_ptr, col, mask):
    """Return x + residual as float32, rounded to their dtype. Stores it to total_ptr, if any."""
    total = tl.load(x_ptr + col, mask=mask, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + col, mask=mask, other=0.0).to(tl.float32)
        total = (residual + total.to(tl.float32)).to(total.dtype)
    if total_ptr is not None:
        tl.store(total_ptr + col, total, mask=mask)
    return total.to(tl.float32)


@triton.jit
def weighted(normed, weight):
    """Return normed (float32), rounded to weight's dtype, times weight, as unrounded float32."""
    return normed.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"
