"""Rows of the embedding table for tokens, some of which only the device knows yet."""

import torch
from torch import Tensor


def embed(token_ids: Tensor, future: Tensor, weight: Tensor) -> Tensor:
    """Looks tokens up, reading those the CPU did not know from the future map.

    Args:
        token_ids: int32 [num_tokens]; a token, or -(slot + 1) for the last one sampled in `slot`.
        future: int32 [num_slots], a valid token in every slot that token_ids names.
        weight: [vocabulary, hidden].
    Returns:
        [num_tokens, hidden] of weight's dtype.
    Raises:
        ValueError: wrong shapes or dtypes.
    """
    if token_ids.ndim != 1 or token_ids.dtype != torch.int32:
        raise ValueError(f"token_ids: int32 [n] expected, got {_shape(token_ids)}")
    if future.ndim != 1 or future.dtype != torch.int32:
        raise ValueError(f"future: int32 [slots] expected, got {_shape(future)}")
    if weight.ndim != 2:
        raise ValueError(f"weight: [vocabulary, hidden] expected, got {_shape(weight)}")
    return embed_reference(token_ids, future, weight)


def embed_reference(token_ids: Tensor, future: Tensor, weight: Tensor) -> Tensor:
    from_future = future.index_select(0, (-token_ids - 1).clamp_(min=0))
    return weight.index_select(0, torch.where(token_ids < 0, from_future, token_ids))


def _shape(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"
