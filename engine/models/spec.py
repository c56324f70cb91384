"""The properties of a model that the engine uses, for every backend."""

from dataclasses import dataclass, field

import torch

from engine.kv_cache.states import DraftState, LayerState
from kernels.quantised import QuantFormat

NOT_QUANTISED = "not quantised"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The properties of a model.

    Attributes:
        dtype: of the checkpoint.
        context_length: tokens that the model was made for.
        layers: the state that each layer keeps of a request. Pool, layout and hand-off derive from
            it.
        draft: the state that a built-in drafter keeps in addition. None: there is no drafter.
        products_per_token: multiplications of a token with weights, without the head's.
        stored: storage scheme of the checkpoint's matrices, for people.
        format: the format of the checkpoint's quantised matrices, if products can use it.
        image_token_side: pixels per side of the square that an image token covers. 0: no images.
        image_token_size: numbers of an image token's embedding, with features for the first layers.
            Excluded from the repr, which nodes compare, because images have their own hash there.
        image_tokens_per_side: rows and columns of every image. 0: they depend on its size. Excluded
            from the repr, too.
        video_frames: frames of a temporal patch of a video. 0: no videos. Excluded from the repr,
            too.
        whole_images: tokens of an image see all tokens of their image. Excluded from the repr, too.
        axial_images: image tokens are positioned by row and column. Excluded from the repr, too.
        generates: the model has a head for tokens.
        num_labels: classes of its classification head. 0: there is none.
    """

    architecture: str
    vocabulary_size: int
    hidden_size: int
    dtype: torch.dtype
    context_length: int
    eos_token_ids: tuple[int, ...]
    layers: tuple[LayerState, ...]
    products_per_token: int
    stored: str = NOT_QUANTISED
    format: QuantFormat | None = None
    generates: bool = True
    num_labels: int = 0
    draft: DraftState | None = None
    image_token_side: int = field(default=0, repr=False)
    image_token_size: int = field(default=0, repr=False)
    image_tokens_per_side: int = field(default=0, repr=False)
    video_frames: int = field(default=0, repr=False)
    whole_images: bool = field(default=False, repr=False)
    axial_images: bool = field(default=False, repr=False)
