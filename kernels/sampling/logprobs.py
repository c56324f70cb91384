"""Log-probabilities of the sampled tokens and of the likeliest alternatives."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import device
from kernels.bound import bound
from kernels.sampling.outline import GROUP, draw_outline, first_among, outline_row
from kernels.sampling.sample import check_logits


def logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probability of one token, and of the likeliest tokens, of every row.

    Args:
        logits: float32, bfloat16 or float16 [n, vocabulary], rows may be strided.
        tokens: int32 [n]. A negative one (no token) counts as token 0.
        num_top: at most the vocabulary.
    Returns:
        Log-probabilities of the tokens, float32 [n]. Then ids int32 and log-probabilities float32
        [n, num_top] of the likeliest tokens, in descending order, equal ones by ascending id. If a
        logit of the row is not finite: NaN, and ids -1.
    Raises:
        ValueError: wrong shapes, strides or dtypes.
    """
    check_logits(logits)
    if tokens.shape != logits.shape[:1] or not tokens.is_contiguous():
        raise ValueError(f"{tuple(tokens.shape)} tokens for {len(logits)} rows")
    if not 0 <= num_top <= logits.shape[1]:
        raise ValueError(f"top {num_top} of {logits.shape[1]} tokens")
    if device.uses_triton(logits):
        return logprobs_triton(logits, tokens, num_top)
    return logprobs_reference(logits, tokens, num_top)


def logprobs_reference(
    logits: Tensor, tokens: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor]:
    logits = logits.float()
    least, largest = logits.aminmax(dim=-1, keepdim=True)
    finite = least.isfinite() & largest.isfinite()
    # Not logsumexp, which splits a single long row between threads: another order of the sum.
    normed = logits.log_softmax(dim=-1)
    chosen = normed.gather(1, tokens.long().clamp(min=0).unsqueeze(1)).where(finite, torch.nan)
    top_ids = _likeliest(logits.where(finite, 0.0), num_top)
    top = normed.gather(1, top_ids).where(finite, torch.nan)
    return chosen.squeeze(1), top_ids.where(finite, -1).int(), top


def _likeliest(logits: Tensor, num_top: int) -> Tensor:
    """Return int64 [n, num_top], descending, equal ones by ascending id. Sorts only candidates."""
    if not num_top or not len(logits):
        return torch.empty(len(logits), num_top, dtype=torch.int64, device=logits.device)
    bar = logits.topk(num_top, dim=-1).values[:, -1:]
    rows, ids = (logits >= bar).nonzero(as_tuple=True)
    order = logits[rows, ids].sort(descending=True, stable=True).indices
    order = order[rows[order].sort(stable=True).indices]
    firsts = torch.searchsorted(rows, torch.arange(len(logits), device=logits.device))
    return ids[order[firsts[:, None] + torch.arange(num_top, device=logits.device)]]


def logprobs_triton(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, vocabulary = logits.shape
    chosen = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    top_ids = torch.empty(num_rows, num_top, dtype=torch.int32, device=logits.device)
    top = torch.empty(num_rows, num_top, dtype=torch.float32, device=logits.device)
    if num_rows:
        outline = draw_outline(logits, with_sums=True)
        width = outline.maxima.shape[1]
        _logprobs_kernel[(num_rows,)](
            logits,
            logits.stride(0),
            outline.maxima,
            outline.sums,
            tokens,
            chosen,
            top_ids,
            top,
            num_top,
            VOCABULARY=vocabulary,
            WIDTH=width,
            LANES=triton.next_power_of_2(width),
            num_warps=4,
            enable_fp_fusion=False,
        )
    return chosen, top_ids, top


@bound
@triton.jit(do_not_specialize=["tokens_ptr", "top_ids_ptr", "top_ptr", "num_top"])
def _logprobs_kernel(
    logits_ptr,
    logits_stride,
    maxima_ptr,
    sums_ptr,
    tokens_ptr,
    chosen_ptr,
    top_ids_ptr,
    top_ptr,
    num_top,
    VOCABULARY: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
):
    """Process one row. Every round finds the next token in the first group that has it, and lowers
    that group's maximum to the largest of its remaining logits."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    top_ids_ptr += row * num_top
    top_ptr += row * num_top
    maxima = outline_row(maxima_ptr, row, float("-inf"), WIDTH, LANES)
    largest = tl.max(maxima)
    if largest < float("inf"):
        sums = outline_row(sums_ptr, row, 0.0, WIDTH, LANES)
        total = tl.log(tl.sum(sums * tl.exp(maxima - largest)))
        token = tl.maximum(tl.load(tokens_ptr + row), 0)
        value = tl.load(row_ptr + token).to(tl.float32)
        tl.store(chosen_ptr + row, value - largest - total)
        groups = tl.arange(0, LANES)
        last = tl.full([], float("inf"), tl.float32)
        last_token = tl.full([], -1, tl.int32)
        for rank in range(num_top):
            value = tl.max(maxima)
            group = first_among(maxima == value, groups)
            tokens = group * GROUP + tl.arange(0, GROUP)
            logits = tl.load(row_ptr + tokens, mask=tokens < VOCABULARY, other=float("-inf"))
            logits = logits.to(tl.float32)
            left = (logits < last) | ((logits == last) & (tokens > last_token))
            last = value
            last_token = first_among(left & (logits == value), tokens)
            tl.store(top_ids_ptr + rank, last_token)
            tl.store(top_ptr + rank, value - largest - total)
            left = left & (tokens != last_token)
            rest = tl.max(tl.where(left, logits, float("-inf")))
            maxima = tl.where(groups == group, rest, maxima)
    else:
        tl.store(chosen_ptr + row, float("nan"))
        for rank in range(num_top):
            tl.store(top_ids_ptr + rank, -1)
            tl.store(top_ptr + rank, float("nan"))
