"""Products with weights of 8 or 4 bits, or of the inputs' dtype.

Inputs are not rounded. A step of few rows reads half or a quarter of the bytes of a 16-bit matrix.
A prompt needs the same number of multiplications.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kernels import device
from kernels.bound import bound
from kernels.quantised import Quantisation, add_product, matrix_tile, num_inputs, widened


class ProductTile(NamedTuple):
    """The shape and launch parameters of one program."""

    rows: int
    columns: int  # of the output
    depth: int
    warps: int
    stages: int


_FEW_ROWS = 64


def tile_for(num_rows: int, element_size: int, group: int) -> ProductTile:
    """Return the tile for a number of rows, and inputs of this size in bytes.

    Few rows are limited by reading the matrix, so narrow tiles occupy all multiprocessors. If no
    row may affect the bits of another, all tiles have the same depth and enough rows for the same
    instruction. The part `bits` of `tools.bench.gpu` checks whether a GPU then adds in the same
    order.

    Args:
        group: inputs that share a scale. 0: there are no scales.
    """
    fixed = device.batch_invariant()
    depth = 32 if element_size > 2 else 64 if fixed else 128
    if group:
        depth = min(depth, group & -group)
    if num_rows <= _FEW_ROWS:
        rows = 16 if num_rows <= 16 and not fixed else _FEW_ROWS
        return ProductTile(rows, 32, depth, 4, 4)
    if element_size > 2:
        return ProductTile(64, 64, depth, 4, 2)
    return ProductTile(128, 128, min(64, depth), 8, 3)


def quantised_linear(
    x: Tensor, numbers: Tensor, quantisation: Quantisation, bias: Tensor | None = None
) -> Tensor:
    """Return x [n, in] times the weights transposed, plus bias [out]: [n, out] of x's dtype.

    Args:
        x: contiguous [n, in].
        numbers: contiguous [out, in], or [out, in / 2] in 4 bits.
    Raises:
        ValueError: wrong shapes, strides or dtypes.
    """
    rows, columns = len(numbers), num_inputs(numbers)
    if x.shape[1:] != (columns,) or not x.is_contiguous() or not numbers.is_contiguous():
        raise ValueError(f"x {tuple(x.shape)} does not fit {(rows, columns)}, or has strides")
    quantisation.check(numbers)
    if not device.uses_triton(x):
        product = x.float() @ widened(numbers, quantisation).t()
        return (product if bias is None else product + bias).to(x.dtype)
    return multiplied(x, numbers, quantisation.arguments(numbers), bias)


def multiplied(
    x: Tensor, numbers: Tensor, arguments: Mapping[str, Any], bias: Tensor | None
) -> Tensor:
    """Compute the product of contiguous x and numbers with the Triton kernel.

    Args:
        arguments: from Quantisation.arguments, or NOT_QUANTISED.
    """
    rows, columns = len(numbers), x.shape[1]
    out = x.new_empty(len(x), rows)
    if not out.numel():
        return out
    tile = tile_for(len(x), x.element_size(), arguments["GROUP"])
    grid = (triton.cdiv(rows, tile.columns), triton.cdiv(len(x), tile.rows))
    _product_kernel[grid](
        x,
        numbers,
        bias_ptr=bias,
        out_ptr=out,
        num_rows=len(x),
        IN=columns,
        OUT=rows,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        UPCAST=device.INTERPRETED,
        **arguments,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=True,
    )
    return out


@bound
@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    x_ptr,
    numbers_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    FORMAT: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Compute one tile of the output."""
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    used, wanted = rows < num_rows, outputs < OUT
    x_rows = x_ptr + rows[:, None].to(tl.int64) * IN
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, IN, BLOCK_K):
        inputs = start + tl.arange(0, BLOCK_K)
        mask = used[:, None]
        if IN % BLOCK_K != 0:
            mask = mask & (inputs < IN)[None, :]
        x = tl.load(x_rows + inputs[None, :], mask=mask, other=0.0)
        if UPCAST:
            x = x.to(tl.float32)
        numbers = matrix_tile(numbers_ptr, outputs, wanted, start, IN, BLOCK_K, FORMAT, PACKED)
        acc = add_product(acc, x, numbers, scales_ptr, zeros_ptr, outputs, wanted, start,
                          GROUP, GROUPS, FORMAT)  # fmt: skip
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + outputs, mask=wanted, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + rows[:, None].to(tl.int64) * OUT + outputs[None, :]
    tl.store(out, acc, mask=used[:, None] & wanted[None, :])
