"""The outline of rows of logits: the maxima of every group and block of consecutive tokens.

One pass reads all logits. Sampling and logprobs then search the outline, and read only the groups
that can have a large logit. Only for Triton: the references need no outline.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.bound import bound

GROUP = tl.constexpr(64)  # tokens, 128 bytes of the smallest dtype
# Per thread. Without a limit, ptxas may spill registers to make room for one more program.
MAX_REGISTERS = 168
LEAST_TEMPERATURE = 1e-37  # its reciprocal is finite
_LEAST_TEMPERATURE = tl.constexpr(LEAST_TEMPERATURE)


class LogitSummary(NamedTuple):
    """The outline of n rows. A maximum is +inf if a logit is not finite, -inf without logits."""

    peaks: Tensor  # float32 [n, blocks], maxima of blocks of block_size(vocabulary) tokens
    # Float32 [n, width], maxima of groups of GROUP tokens. The width covers whole blocks.
    maxima: Tensor
    sums: Tensor | None  # float32 [n, width] of exp((logit - maximum) / temperature), if requested


def block_size(vocabulary: int) -> int:
    """Return the tokens per program, a power of two. To be tuned with tools/bench/gpu."""
    block: int = min(4096, max(GROUP.value, triton.next_power_of_2(vocabulary)))
    return block


def draw_outline(
    logits: Tensor,
    *,
    temperature: Tensor | None = None,
    top_p: Tensor | None = None,
    with_sums: bool,
) -> LogitSummary:
    """Compute the outline. Reads every logit once.

    Args:
        logits: float32, bfloat16 or float16 [n, vocabulary], rows may be strided.
        temperature, top_p: float32 [n]. If given, only rows that are not greedy and have a top_p
            below 1 get sums. None: every row, at temperature 1.
        with_sums: False: no row gets sums.
    """
    num_rows, vocabulary = logits.shape
    block = block_size(vocabulary)
    num_blocks = triton.cdiv(vocabulary, block)
    peaks = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=logits.device)
    maxima = peaks.new_empty(num_rows, num_blocks * block // GROUP.value)
    sums = torch.empty_like(maxima) if with_sums else None
    if num_rows:
        _outline_kernel[(num_rows, num_blocks)](
            logits,
            logits.stride(0),
            peaks,
            maxima,
            sums,
            temperature,
            top_p,
            VOCABULARY=vocabulary,
            BLOCK=block,
            num_warps=4,
            maxnreg=MAX_REGISTERS,
            enable_fp_fusion=False,
        )
    return LogitSummary(peaks, maxima, sums)


@bound
@triton.jit(do_not_specialize=["temperature_ptr", "top_p_ptr"])
def _outline_kernel(
    logits_ptr,
    logits_stride,
    peaks_ptr,
    maxima_ptr,
    sums_ptr,
    temperature_ptr,
    top_p_ptr,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the outline of one row and one block of groups."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    groups = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    tokens = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = tokens < VOCABULARY
    logits = tl.load(logits_ptr + row * logits_stride + tokens, mask=inside, other=0.0)
    logits = logits.to(tl.float32)
    logits = tl.where(tl.abs(logits) < float("inf"), logits, float("inf"))
    logits = tl.where(inside, logits, float("-inf"))
    maxima = tl.max(logits, axis=1)
    place = row * tl.num_programs(1) + block
    tl.store(peaks_ptr + place, tl.max(maxima))
    places = row * tl.num_programs(1) * (BLOCK // GROUP) + groups
    tl.store(maxima_ptr + places, maxima)
    if sums_ptr is not None:
        wanted = True
        inverse = 1.0
        if temperature_ptr is not None:
            temperature = tl.load(temperature_ptr + row)
            inverse = inverse_temperature(temperature)
            wanted = (temperature > 0.0) & (tl.load(top_p_ptr + row) < 1.0)
        if wanted:
            highest = tl.where(tl.abs(maxima) < float("inf"), maxima, 0.0)
            sums = tl.sum(tl.exp((logits - highest[:, None]) * inverse), axis=1)
            tl.store(sums_ptr + places, sums)


@triton.jit
def inverse_temperature(temperature):
    """Return 1 / temperature, rounded as in the reference. Finite for every temperature."""
    return tl.div_rn(1.0, tl.maximum(temperature, _LEAST_TEMPERATURE))


@triton.jit
def outline_row(values_ptr, row, other, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """Load a row of peaks, maxima or sums as float32 [LANES], `other` after its WIDTH values."""
    lanes = tl.arange(0, LANES)
    return tl.load(values_ptr + row * WIDTH + lanes, mask=lanes < WIDTH, other=other)


@triton.jit
def first_among(chosen, values):
    """Return the smallest of the chosen int32 values, or 2**31 - 1 if none is chosen."""
    return tl.min(tl.where(chosen, values, 0x7FFFFFFF))
