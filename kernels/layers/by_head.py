"""Products of each head's vector with a matrix of that head."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import device
from kernels.bound import bound
from kernels.cpu.operators import PANEL, WORD_BYTES, Operators

BLOCK_M, BLOCK_N = 64, 64  # tile of the Triton kernel


@dataclass(frozen=True, slots=True, eq=False)
class HeadMatrices:
    """A matrix for each head.

    Attributes:
        weight: [heads, in, out], or with `operators` the panels of each head's [out, in].
    """

    weight: Tensor
    operators: Operators | None = None

    @classmethod
    def of(cls, weights: Tensor) -> "HeadMatrices":
        """Return matrices [heads, in, out]. Shares the tensor if no product is compiled for it."""
        operators = _operators(weights)
        if operators is None:
            return cls(weights)
        panels = [operators.pack_panels(weight.mT) for weight in weights]
        return cls(torch.stack(panels), operators)

    @property
    def nbytes(self) -> int:
        """Additional memory in bytes, with the padding of panels. 0 if the weights are shared."""
        return 0 if self.operators is None else self.weight.nbytes

    def multiply(self, x: Tensor, out: Tensor) -> None:
        """Write the products of x [n, heads, in] into out [n, heads, outputs], any strides but the
        last. With compiled products, and on a GPU with `device.use_batch_invariant`, no row affects
        the bits of another."""
        if self.operators is not None:
            self.operators.by_head_product(x, self.weight, out)
        elif device.uses_triton(x) and device.batch_invariant():
            _multiply(x, self.weight, out)
        else:
            torch.bmm(x.transpose(0, 1), self.weight, out=out.transpose(0, 1))


def packed_bytes(weights: Tensor) -> int:
    """Return the bytes that `HeadMatrices.of` allocates for such weights on this machine's CPU."""
    heads, inputs, outputs = weights.shape
    padded = -(-outputs // PANEL) * PANEL
    return 0 if _operators(weights) is None else heads * inputs * padded * weights.itemsize


def _operators(weights: Tensor) -> Operators | None:
    if weights.is_cuda:
        return None
    operators = device.compiled_for(torch.device("cpu"))
    if operators is None or not operators.multiplies(weights.dtype):
        return None
    return None if weights.shape[1] * weights.itemsize % WORD_BYTES else operators


def _multiply(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Multiply with the same tile for any number of rows."""
    if x.stride(2) != 1 or out.stride(2) != 1 or not weight.is_contiguous():
        raise ValueError(f"contiguous numbers expected, got {x.stride()} and {weight.stride()}")
    num_rows, heads, inputs = x.shape
    if not num_rows:
        return
    depth = 64 if x.element_size() == 2 else 32
    columns = min(BLOCK_N, int(triton.next_power_of_2(weight.shape[2])))
    grid = (triton.cdiv(weight.shape[2], columns), triton.cdiv(num_rows, BLOCK_M), heads)
    _by_head_kernel[grid](
        x,
        weight,
        out,
        num_rows,
        X_STRIDE=x.stride(0),
        X_HEAD_STRIDE=x.stride(1),
        OUT_STRIDE=out.stride(0),
        OUT_HEAD_STRIDE=out.stride(1),
        IN=inputs,
        OUT=weight.shape[2],
        BLOCK_M=BLOCK_M,
        BLOCK_N=max(16, columns),
        BLOCK_K=depth,
        UPCAST=device.INTERPRETED,
        num_warps=4,
        num_stages=3,
        enable_fp_fusion=True,
    )


@bound
@triton.jit(do_not_specialize=["num_rows"])
def _by_head_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    X_STRIDE: tl.constexpr,
    X_HEAD_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    OUT_HEAD_STRIDE: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Compute one tile of the output of a head."""
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(2).to(tl.int64)
    used, wanted = (rows < num_rows)[:, None], (outputs < OUT)[None, :]
    x_rows = x_ptr + head * X_HEAD_STRIDE + rows[:, None].to(tl.int64) * X_STRIDE
    matrix_ptr = weight_ptr + head * (IN * OUT) + outputs[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, IN, BLOCK_K):
        inputs = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_rows + inputs[None, :], mask=used & (inputs < IN)[None, :], other=0.0)
        mask = wanted & (inputs < IN)[:, None]
        matrix = tl.load(matrix_ptr + inputs[:, None] * OUT, mask=mask, other=0.0)
        if UPCAST:
            x, matrix = x.to(tl.float32), matrix.to(tl.float32)
        acc = tl.dot(x, matrix, acc, input_precision="ieee")
    out_rows = out_ptr + head * OUT_HEAD_STRIDE + rows[:, None].to(tl.int64) * OUT_STRIDE
    tl.store(out_rows + outputs[None, :], acc, mask=used & wanted)
