"""What the engine knows of any model, whoever computes it."""

from dataclasses import dataclass, field

import torch

from engine.kv_cache.states import DraftState, State

NOT_QUANTISED = "not quantised"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """
    dtype: of the checkpoint.
    context_length: tokens that the model was made for.
    layers: what each layer keeps of a request: pool, layout and hand-off derive from it.
    draft: what a drafter that is a part of it keeps beside them; None: none is.
    products_per_token: multiplications of a token with weights, without the head's.
    stored: how the checkpoint stores matrices, for people; int8_stored: they are int8 by channel.
    image_token_side: pixels a side of what a token of an image stands for; 0: it sees none. Not
        part of the repr, which is compared: images have a hash of their own there.
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
    draft: DraftState | None = None
    image_token_side: int = field(default=0, repr=False)
