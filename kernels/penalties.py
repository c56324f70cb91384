"""Repetition, frequency and presence penalties, from token counts kept on the device."""

import torch
from torch import Tensor

IN_PROMPT = 1 << 30  # added to a token's count where the prompt has it; below it, the outputs


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
    """Penalises rows[i] of logits by count_rows[i] of counts, in place.

    Repetition first (tokens of prompt and output: positive logits divided by it, others
    multiplied), then minus frequency * count and minus presence, both for output tokens.

    Args:
        logits: float32 [n, vocabulary].
        rows, count_rows: int64 [m], rows distinct.
        counts: int32 [any, vocabulary], of `count_tokens`.
        repetition, frequency, presence: float32 [m].
    Raises:
        ValueError: wrong shapes.
    """
    if logits.ndim != 2 or counts.ndim != 2 or logits.shape[1] != counts.shape[1]:
        raise ValueError(
            f"[n, vocabulary] twice, got {tuple(logits.shape)} and {tuple(counts.shape)}"
        )
    if not rows.shape == count_rows.shape == repetition.shape == frequency.shape == presence.shape:
        raise ValueError("rows, count_rows and the penalties differ in length")
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


def count_tokens(counts: Tensor, rows: Tensor, tokens: Tensor, *, prompt: bool) -> None:
    """Counts tokens[i] in row rows[i], in place; pairs may repeat.

    Prompt tokens are marked before the row's outputs are counted.

    Args:
        counts: int32 [any, vocabulary].
        rows: int64 [n].
        tokens: int [n]; a negative one (no token) counts as token 0.
    Raises:
        ValueError: wrong shapes.
    """
    if counts.ndim != 2 or rows.shape != tokens.shape:
        raise ValueError(
            f"rows and tokens [n] expected, got {tuple(rows.shape)} and {tuple(tokens.shape)}"
        )
    tokens = tokens.long().clamp(min=0)
    value = torch.full((), IN_PROMPT if prompt else 1, dtype=torch.int32, device=counts.device)
    counts.index_put_((rows, tokens), value, accumulate=not prompt)
