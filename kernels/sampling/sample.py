"""Sampling of one token per row: a pure function of logits, seed and absolute token index.

All implementations order tokens by their raw logits, scale and filter by the same float32
operations, and draw with the same random bits. They therefore choose the same tokens, with two
exceptions: the mass ahead of a token is within about 1e-6 of top_p, or two tokens differ by no more
than a rounding error of the logarithm.
"""

from dataclasses import dataclass, fields

import torch
import triton
from torch import Tensor

from kernels import device
from kernels.sampling.generator import gumbel_noise
from kernels.sampling.outline import (
    LEAST_TEMPERATURE,
    MAX_REGISTERS,
    LogitSummary,
    block_size,
    draw_outline,
)
from kernels.sampling.race import choose_kernel, likeliest_kernel, race_kernel

NOT_FINITE = -2


@dataclass(frozen=True, slots=True, eq=False)
class SamplingColumns:
    """Sampling parameters, with one entry per row."""

    temperature: Tensor  # float32 [n], 0: greedy
    top_k: Tensor  # int32 [n], below 1: off
    top_p: Tensor  # float32 [n], 1: off
    min_p: Tensor  # float32 [n], 0: off
    seeds: Tensor  # int32 [n, 2], low and high word
    positions: Tensor  # int32 [n], absolute index of the token to sample

    def at(self, places: Tensor) -> "SamplingColumns":
        """Return the parameters of the rows at int64 [any], contiguous."""
        return SamplingColumns(*(getattr(self, each.name)[places] for each in fields(self)))


def check_logits(logits: Tensor) -> None:
    """Raise ValueError unless logits are float32, bfloat16 or float16 [n, vocabulary] with
    contiguous rows, which may be strided."""
    if logits.ndim != 2 or logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"float32, bfloat16 or float16 [n, vocabulary] expected, got {logits.dtype} "
            f"{tuple(logits.shape)}"
        )
    if logits.stride(1) != 1:
        raise ValueError(f"contiguous rows expected, got strides {logits.stride()}")


def sample(logits: Tensor, columns: SamplingColumns | None) -> Tensor:
    """Choose a token for every row.

    The order is temperature, top_k, top_p of the remaining tokens, then min_p relative to the
    likeliest token. Among equal logits the lower token id goes first. The likeliest token always
    stays. A row's token depends on no other row.

    Args:
        logits: float32, bfloat16 or float16 [n, vocabulary], penalties already applied. Rows may be
            strided. May be overwritten.
        columns: contiguous. None if every row is greedy.
    Returns:
        int32 [n]: a token id, or NOT_FINITE if any logit of the row is not finite.
    Raises:
        ValueError: wrong shapes, strides or dtypes.
    """
    check_logits(logits)
    if columns is not None:
        _check(columns, len(logits))
    if device.uses_triton(logits):
        return sample_triton(logits, columns)
    if (compiled := device.compiled(logits)) is None:
        return sample_reference(logits, columns)
    if columns is None:
        return compiled.likeliest(logits, NOT_FINITE)
    return compiled.sample(
        logits,
        temperature=columns.temperature,
        top_k=columns.top_k,
        top_p=columns.top_p,
        min_p=columns.min_p,
        seeds=columns.seeds,
        positions=columns.positions,
        not_finite=NOT_FINITE,
    )


def _check(columns: SamplingColumns, num_rows: int) -> None:
    if columns.temperature.shape != (num_rows,) or columns.seeds.shape != (num_rows, 2):
        raise ValueError(f"{len(columns.temperature)} parameters for {num_rows} rows")
    for name in ("temperature", "top_k", "top_p", "min_p", "seeds", "positions"):
        column = getattr(columns, name)
        if len(column) != num_rows or not column.is_contiguous():
            raise ValueError(f"{name}: contiguous [{num_rows}] expected, got {column.shape}")


def sample_reference(logits: Tensor, columns: SamplingColumns | None) -> Tensor:
    logits = logits.float()
    finite = logits.isfinite().all(dim=-1)
    if columns is not None:
        logits = _perturbed(logits, columns)
    return logits.argmax(dim=-1).where(finite, NOT_FINITE).int()


def _perturbed(logits: Tensor, columns: SamplingColumns) -> Tensor:
    """Return scores, whose largest is that of the sampled token (Gumbel-max). Overwrites logits."""
    greedy = columns.temperature == 0.0
    temperature = columns.temperature.clamp(min=LEAST_TEMPERATURE)
    inverse = torch.where(greedy, 1.0, temperature.reciprocal_()).unsqueeze(1)
    rows = (((columns.top_k > 0) | (columns.top_p < 1.0)) & ~greedy).nonzero().squeeze(1)
    if len(rows):
        logits[rows] = _filtered(
            logits[rows], inverse[rows], columns.top_k[rows], columns.top_p[rows]
        )
    scaled = logits.sub_(logits.amax(dim=-1, keepdim=True)).mul_(inverse)
    least = torch.where(greedy, 0.0, columns.min_p).log_().clamp_(max=0.0).unsqueeze(1)
    scaled.masked_fill_(scaled < least, -torch.inf)
    noise = gumbel_noise(columns.seeds, columns.positions, logits.shape[1])
    return scaled.add_(noise.masked_fill_(greedy.unsqueeze(1), 0.0))


def _filtered(logits: Tensor, inverse: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return logits, with -inf where top_k or top_p removes the token."""
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    removed = rank >= torch.where(top_k < 1, logits.shape[1], top_k).unsqueeze(1)
    weights = ordered.sub(ordered[:, :1]).mul_(inverse).exp_().double()
    total = weights.masked_fill_(removed, 0.0).cumsum(dim=-1)
    # Compared in float32, where sums of equal weights are exact in every implementation.
    limit = (top_p * total[:, -1].float()).unsqueeze(1)
    removed |= ((total - weights).float() >= limit) & (top_p < 1.0).unsqueeze(1)
    removed[:, 0] = False
    ordered.masked_fill_(removed, -torch.inf)
    return torch.empty_like(logits).scatter_(1, tokens, ordered)


def sample_triton(logits: Tensor, columns: SamplingColumns | None) -> Tensor:
    num_rows = len(logits)
    tokens = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if not num_rows:
        return tokens
    if columns is None:
        outline = draw_outline(logits, with_sums=False)
        likeliest_kernel[(num_rows,)](
            logits,
            logits.stride(0),
            outline.maxima,
            tokens,
            **_constants(logits, outline),
            num_warps=4,
            enable_fp_fusion=False,
        )
        return tokens
    outline = draw_outline(
        logits, temperature=columns.temperature, top_p=columns.top_p, with_sums=True
    )
    scores, winners = _race(logits, outline.peaks, columns)
    num_blocks = scores.shape[1]
    choose_kernel[(num_rows,)](
        logits,
        logits.stride(0),
        outline.maxima,
        outline.sums,
        scores,
        winners,
        torch.empty_like(outline.maxima, dtype=torch.int32),
        columns.temperature,
        columns.top_k,
        columns.top_p,
        columns.min_p,
        columns.seeds,
        columns.positions,
        tokens,
        **_constants(logits, outline),
        NUM_BLOCKS=num_blocks,
        BLOCK_LANES=triton.next_power_of_2(num_blocks),
        num_warps=8,
        maxnreg=MAX_REGISTERS,
        enable_fp_fusion=False,
    )
    return tokens


def _race(logits: Tensor, peaks: Tensor, columns: SamplingColumns) -> tuple[Tensor, Tensor]:
    """Return the sampled token of each block of tokens, and its score. Entries of rows that do not
    use them are uninitialised."""
    num_rows, vocabulary = logits.shape
    num_peaks = peaks.shape[1]
    peaks_of_block = min(2, triton.next_power_of_2(num_peaks))
    block = block_size(vocabulary) * peaks_of_block
    num_blocks = triton.cdiv(vocabulary, block)
    scores = peaks.new_empty(num_rows, num_blocks)
    winners = peaks.new_empty(num_rows, num_blocks, dtype=torch.int32)
    race_kernel[(num_rows, num_blocks)](
        logits,
        logits.stride(0),
        peaks,
        columns.temperature,
        columns.top_k,
        columns.min_p,
        columns.seeds,
        columns.positions,
        scores,
        winners,
        VOCABULARY=vocabulary,
        NUM_PEAKS=num_peaks,
        LANES=triton.next_power_of_2(num_peaks),
        BLOCK=block,
        PEAKS=peaks_of_block,
        TILE=min(1024, block),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return scores, winners


def _constants(logits: Tensor, outline: LogitSummary) -> dict[str, int]:
    width = outline.maxima.shape[1]
    return {
        "VOCABULARY": logits.shape[1],
        "WIDTH": width,
        "LANES": triton.next_power_of_2(width),
        "NOT_FINITE": NOT_FINITE,
    }
