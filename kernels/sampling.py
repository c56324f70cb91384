"""One token per row of logits: a pure function of logits, seed and absolute token index."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.generator import gumbel_noise

NOT_FINITE = -2


@dataclass(frozen=True, slots=True, eq=False)
class SamplingColumns:
    """One entry per row. `filtered` is what the host knows of the rows, so that nothing has to ask
    the device: those that are not greedy and whose top_k, top_p or min_p can remove a token.
    """

    temperature: Tensor  # float32 [n]; 0: greedy
    top_k: Tensor  # int32 [n]; below 1: off
    top_p: Tensor  # float32 [n]; 1: off
    min_p: Tensor  # float32 [n]; 0: off
    seeds: Tensor  # int32 [n, 2], low and high word
    positions: Tensor  # int32 [n], absolute index of the token to sample
    filtered: Tensor  # int64 [m]


def sample(logits: Tensor, columns: SamplingColumns | None) -> Tensor:
    """Chooses a token for every row.

    Temperature first; then top_k; top_p of what is left; min_p relative to the likeliest token.
    Equal logits: the lower token id goes first. A row's token depends on no other row.

    Args:
        logits: float32 [n, vocabulary], penalties already applied; may be overwritten.
        columns: None where every row is greedy.
    Returns:
        int32 [n]: a token id, or NOT_FINITE where any logit of the row is not finite.
    Raises:
        ValueError: wrong shapes or dtypes.
    """
    if logits.ndim != 2 or logits.dtype != torch.float32:
        raise ValueError(f"float32 [n, vocabulary] expected, got {logits.dtype} {logits.shape}")
    if columns is not None and columns.temperature.shape != logits.shape[:1]:
        raise ValueError(f"{len(columns.temperature)} parameters for {len(logits)} rows")
    return sample_reference(logits, columns)


def sample_reference(logits: Tensor, columns: SamplingColumns | None) -> Tensor:
    finite = logits.isfinite().all(dim=-1)
    if columns is not None:
        _perturb(logits, columns)
    return logits.argmax(dim=-1).where(finite, NOT_FINITE).int()


def _perturb(logits: Tensor, columns: SamplingColumns) -> None:
    """Makes the largest logit the sampled one, in place: Gumbel-max."""
    greedy = columns.temperature == 0.0
    scale = torch.where(greedy, 1.0, columns.temperature).unsqueeze(1)
    # The largest becomes 0, so that a tiny temperature sends the others to -inf and none to nan.
    logits.sub_(logits.amax(dim=-1, keepdim=True)).div_(scale)
    rows = columns.filtered
    if len(rows):
        logits[rows] = _filter(
            logits[rows], columns.top_k[rows], columns.top_p[rows], columns.min_p[rows]
        )
    noise = gumbel_noise(columns.seeds, columns.positions, logits.shape[1])
    logits += noise.masked_fill_(greedy.unsqueeze(1), 0.0)


def _filter(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """logits, -inf where a filter removes the token. The likeliest token always stays."""
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    top_k = torch.where(top_k < 1, logits.shape[1], top_k).unsqueeze(1)
    ordered.masked_fill_(rank >= top_k, -torch.inf)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    top_p, min_p = top_p.unsqueeze(1), min_p.unsqueeze(1)
    removed = (before >= top_p) & (top_p < 1.0)
    removed |= probabilities < min_p * probabilities[:, :1]
    removed[:, 0] = False
    ordered.masked_fill_(removed, -torch.inf)
    return torch.empty_like(logits).scatter_(1, tokens, ordered)
