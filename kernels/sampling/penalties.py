"""Repetition, frequency and presence penalties, from token counts kept on the device."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import device
from kernels.bound import bound

IN_PROMPT = 1 << 30  # added to the count of a prompt token. Lower bits count outputs


def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    counts: Tensor,
    count_rows: Tensor,
    *,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """Penalise rows[i] of logits by count_rows[i] of counts, in place.

    Repetition applies first, to tokens of prompt and output: positive logits are divided by it,
    others multiplied. Then frequency * count and presence are subtracted, for output tokens only.

    Args:
        logits: float32 [n, vocabulary], rows may be strided.
        rows, count_rows: int64 [m], rows distinct.
        counts: int32 [any, vocabulary], from `count_tokens`.
        repetition, frequency, presence: float32 [m].
    Raises:
        ValueError: wrong shapes, strides or dtypes.
    """
    if logits.ndim != 2 or counts.ndim != 2 or logits.shape[1] != counts.shape[1]:
        raise ValueError(
            f"[n, vocabulary] twice, got {tuple(logits.shape)} and {tuple(counts.shape)}"
        )
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or counts.stride(1) != 1:
        raise ValueError(f"float32 logits and contiguous rows expected, got {logits.dtype}")
    columns = (rows, count_rows, repetition, frequency, presence)
    if any(column.shape != rows.shape or not column.is_contiguous() for column in columns):
        raise ValueError("rows, count_rows and the penalties differ in length, or are strided")
    if device.uses_triton(logits):
        apply_penalties_triton(logits, rows, counts, count_rows, repetition, frequency, presence)
    elif (compiled := device.compiled(logits)) is not None:
        compiled.apply_penalties(
            logits, rows, counts, count_rows, repetition, frequency, presence, IN_PROMPT
        )
    else:
        apply_penalties_reference(logits, rows, counts, count_rows, repetition, frequency, presence)


def apply_penalties_reference(
    logits: Tensor,
    rows: Tensor,
    counts: Tensor,
    count_rows: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    seen = counts[count_rows]
    outputs = seen & (IN_PROMPT - 1)
    penalised = logits[rows]
    strength = repetition[:, None]
    repeated = torch.where(penalised > 0, penalised / strength, penalised * strength)
    penalised = torch.where(seen > 0, repeated, penalised)
    penalised -= frequency[:, None] * outputs
    penalised -= presence[:, None] * (outputs > 0)
    logits[rows] = penalised


def apply_penalties_triton(
    logits: Tensor,
    rows: Tensor,
    counts: Tensor,
    count_rows: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    vocabulary = logits.shape[1]
    if rows.numel():
        block = min(2048, triton.next_power_of_2(vocabulary))
        # Without fused multiply-add, so that every bit equals the reference.
        _apply_penalties_kernel[(len(rows), triton.cdiv(vocabulary, block))](
            logits,
            logits.stride(0),
            rows,
            counts,
            counts.stride(0),
            count_rows,
            repetition,
            frequency,
            presence,
            VOCABULARY=vocabulary,
            IN_PROMPT=IN_PROMPT,
            BLOCK=block,
            num_warps=4,
            enable_fp_fusion=False,
        )


@bound
@triton.jit(
    do_not_specialize=[
        "rows_ptr",
        "count_rows_ptr",
        "repetition_ptr",
        "frequency_ptr",
        "presence_ptr",
    ]
)
def _apply_penalties_kernel(
    logits_ptr,
    logits_stride,
    rows_ptr,
    counts_ptr,
    counts_stride,
    count_rows_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    VOCABULARY: tl.constexpr,
    IN_PROMPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Penalise one row and one block of tokens. Changes only logits of counted tokens."""
    place = tl.program_id(0)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    count_row = tl.load(count_rows_ptr + place).to(tl.int64)
    seen = tl.load(
        counts_ptr + count_row * counts_stride + tokens, mask=tokens < VOCABULARY, other=0
    )
    logits_ptr += tl.load(rows_ptr + place).to(tl.int64) * logits_stride
    logits = tl.load(logits_ptr + tokens, mask=seen > 0, other=0.0)
    repetition = tl.load(repetition_ptr + place)
    logits = tl.where(logits > 0.0, tl.div_rn(logits, repetition), logits * repetition)
    outputs = seen & (IN_PROMPT - 1)
    logits -= tl.load(frequency_ptr + place) * outputs.to(tl.float32)
    logits -= tl.where(outputs > 0, tl.load(presence_ptr + place), 0.0)
    tl.store(logits_ptr + tokens, logits, mask=seen > 0)


def count_tokens(
    counts: Tensor, rows: Tensor, tokens: Tensor, *, prompt: bool, times: int = 1
) -> None:
    """Count tokens[i] in row rows[i], in place. Pairs may repeat.

    A row's prompt tokens must be marked before its output tokens are counted.

    Args:
        counts: int32 [any, vocabulary].
        rows: int64 [n].
        tokens: int [n]. A negative one (no token) counts as token 0.
        times: change of an output token's count. -1 removes it.
    Raises:
        ValueError: wrong shapes or strides.
    """
    if counts.ndim != 2 or counts.stride(1) != 1 or rows.shape != tokens.shape:
        raise ValueError(
            f"rows and tokens [n] expected, got {tuple(rows.shape)} and {tuple(tokens.shape)}"
        )
    if not rows.is_contiguous() or not tokens.is_contiguous():
        raise ValueError("rows and tokens must be contiguous")
    if device.uses_triton(counts):
        count_tokens_triton(counts, rows, tokens, prompt=prompt, times=times)
    else:
        count_tokens_reference(counts, rows, tokens, prompt=prompt, times=times)


def count_tokens_reference(
    counts: Tensor, rows: Tensor, tokens: Tensor, *, prompt: bool, times: int = 1
) -> None:
    tokens = tokens.long().clamp(min=0)
    value = torch.full((), IN_PROMPT if prompt else times, dtype=torch.int32, device=counts.device)
    counts.index_put_((rows, tokens), value, accumulate=not prompt)


def count_tokens_triton(
    counts: Tensor, rows: Tensor, tokens: Tensor, *, prompt: bool, times: int = 1
) -> None:
    num_tokens = len(rows)
    if num_tokens:
        _count_tokens_kernel[(triton.cdiv(num_tokens, 128),)](
            counts,
            counts.stride(0),
            rows,
            tokens,
            num_tokens,
            VALUE=IN_PROMPT if prompt else times,
            ADD=not prompt,
            BLOCK=128,
            num_warps=4,
            enable_fp_fusion=False,
        )


@bound
@triton.jit(do_not_specialize=["rows_ptr", "tokens_ptr", "num_tokens"])
def _count_tokens_kernel(
    counts_ptr,
    counts_stride,
    rows_ptr,
    tokens_ptr,
    num_tokens,
    VALUE: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < num_tokens
    row = tl.load(rows_ptr + places, mask=inside, other=0).to(tl.int64)
    token = tl.maximum(tl.load(tokens_ptr + places, mask=inside, other=0), 0)
    targets = counts_ptr + row * counts_stride + token
    if ADD:
        tl.atomic_add(targets, VALUE, mask=inside, sem="relaxed")
    else:
        tl.store(targets, VALUE, mask=inside)
