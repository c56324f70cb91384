"""Masking of logits that a grammar forbids, with one bit per token."""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import device
from kernels.bound import bound

# Never sampled if any token is allowed. Not -inf, which means that the row's forward failed.
FORBIDDEN = -1e30
_WORD = tl.constexpr(32)


def apply_bitmask(logits: Tensor, rows: Tensor, bitmask: Tensor) -> None:
    """Set logits in rows[i] to FORBIDDEN where bitmask[i] has a 0, in place.

    Args:
        logits: float32 [n, vocabulary], rows may be strided.
        rows: int64 [m], distinct.
        bitmask: int32 [m, ceil(vocabulary / 32)]. Token t is bit t % 32 of word t // 32, the lowest
            bit first. Bits beyond the vocabulary are ignored.
    Raises:
        ValueError: wrong shapes, strides or dtypes.
    """
    if logits.ndim != 2 or logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(
            f"float32 [n, vocabulary] expected, got {logits.dtype} {tuple(logits.shape)}"
        )
    shape = (len(rows), triton.cdiv(logits.shape[1], 32))
    if bitmask.shape != shape or bitmask.dtype != torch.int32 or not bitmask.is_contiguous():
        raise ValueError(
            f"contiguous int32 {shape} expected, got {bitmask.dtype} {tuple(bitmask.shape)}"
        )
    if rows.ndim != 1 or not rows.is_contiguous():
        raise ValueError(f"contiguous rows [m] expected, got {tuple(rows.shape)}")
    if device.uses_triton(logits):
        apply_bitmask_triton(logits, rows, bitmask)
    else:
        apply_bitmask_reference(logits, rows, bitmask)


def apply_bitmask_reference(logits: Tensor, rows: Tensor, bitmask: Tensor) -> None:
    words = (~bitmask).numpy().view(np.uint8)
    bits = np.unpackbits(words, axis=1, count=logits.shape[1], bitorder="little")
    for row, forbidden in zip(rows.tolist(), torch.from_numpy(bits).view(torch.bool), strict=True):
        logits[row].masked_fill_(forbidden, FORBIDDEN)


def apply_bitmask_triton(logits: Tensor, rows: Tensor, bitmask: Tensor) -> None:
    vocabulary = logits.shape[1]
    if rows.numel():
        words = min(128, triton.next_power_of_2(bitmask.shape[1]))
        _apply_bitmask_kernel[(len(rows), triton.cdiv(bitmask.shape[1], words))](
            logits,
            logits.stride(0),
            rows,
            bitmask,
            VOCABULARY=vocabulary,
            WORDS=words,
            FORBIDDEN=FORBIDDEN,
            num_warps=4,
            enable_fp_fusion=False,
        )


@bound
@triton.jit(do_not_specialize=["rows_ptr", "bitmask_ptr"])
def _apply_bitmask_kernel(
    logits_ptr,
    logits_stride,
    rows_ptr,
    bitmask_ptr,
    VOCABULARY: tl.constexpr,
    WORDS: tl.constexpr,
    FORBIDDEN: tl.constexpr,
):
    """Mask one row and one block of words. Reads no logits."""
    place = tl.program_id(0).to(tl.int64)
    num_words: tl.constexpr = (VOCABULARY + _WORD - 1) // _WORD
    words = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    bits = tl.load(bitmask_ptr + place * num_words + words, mask=words < num_words, other=0)
    columns = tl.arange(0, _WORD)
    forbidden = ((bits[:, None] >> columns[None, :]) & 1) == 0
    tokens = words[:, None] * _WORD + columns[None, :]
    row = tl.load(rows_ptr + place).to(tl.int64)
    targets = logits_ptr + row * logits_stride + tokens
    values = tl.full([WORDS, _WORD], FORBIDDEN, tl.float32)
    tl.store(targets, values, mask=forbidden & (tokens < VOCABULARY))
