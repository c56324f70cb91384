"""The properties of a model that the engine uses, for every backend."""

from dataclasses import dataclass, field

import torch

from common.config import Quantize
from engine.kv_cache.states import DraftState, LayerState
from engine.ranks import WHOLE, Share
from kernels.quantised import QuantFormat

NOT_QUANTISED = "not quantized"


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """The form in which a rank loads its part of a model.

    Attributes:
        dtype: compute dtype.
        share: the rank's part. Forwards and heads use the collectives of its group.
    """

    device: torch.device
    dtype: torch.dtype
    quantize: Quantize = "none"
    share: Share = WHOLE


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The properties of a model.

    Attributes:
        dtype: of the checkpoint.
        context_length: maximum number of tokens that the model supports.
        layers: the state that each layer keeps of a request. Pool, layout and hand-off are derived
            from it.
        draft: the state that a built-in drafter keeps in addition. None: there is no drafter.
        products_per_token: multiplications with weights per token, without the head.
        stored: storage scheme of the checkpoint's matrices, for messages.
        format: format of the checkpoint's quantised matrices, if products use it directly.
        image_token_side: pixels per side of the square that an image token covers. 0: no images.
        image_token_size: numbers of an image token's embedding, including features for the first
            layers. Nodes compare the repr of a spec. This field and the following ones up to
            axial_images are not in it, because images have their own hash.
        image_tokens_per_side: rows and columns of every image. 0: they depend on its size.
        video_frames: frames of a temporal patch of a video. 0: no videos.
        whole_images: whether image tokens attend to all tokens of their image.
        axial_images: whether image tokens are positioned by row and column.
        generates: whether the model has a head for tokens.
        num_labels: number of classes of the classification head. 0: there is none.
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
