"""What the engine knows of any model, whoever computes it."""

from dataclasses import dataclass

import torch

from common.engine.memory.states import State

NOT_QUANTISED = "not quantised"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """
    dtype: of the checkpoint.
    context_length: tokens that the model was made for.
    layers: what each layer keeps of a request: pool, layout and hand-off derive from it.
    products_per_token: multiplications of a token with weights, without the head's.
    stored: how the checkpoint stores matrices, for people; int8_stored: they are int8 by channel.
    generates: it has a head for tokens; num_labels: of its head for classes, 0: it has none.
    """

    architecture: str
    vocabulary_size: int
    hidden_size: int
    dtype: torch.dtype
    context_length: int
    eos_token_ids: tuple[int, ...]
    layers: tuple[State, ...]
    products_per_token: int
    stored: str = NOT_QUANTISED
    int8_stored: bool = False
    generates: bool = True
    num_labels: int = 0
