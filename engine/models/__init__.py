"""Models: load a checkpoint and compute logits with it."""

from pathlib import Path

import torch

from common.config import ModelBackend, Quantize, SpeculativeConfig
from engine.models.checkpoint import content
from engine.models.choice import (
    NO_DRAFTS,
    LoadableModel,
    constants,
    open_checkpoint,
    stored_of,
    tokenizer_hash,
)
from engine.models.model import Model
from engine.models.spec import LoadTarget, ModelSpec

__all__ = [
    "LoadTarget",
    "LoadableModel",
    "Model",
    "ModelSpec",
    "constants",
    "content",
    "load",
    "open_checkpoint",
    "stored_of",
    "tokenizer_hash",
]


def load(
    directory: Path,
    device: torch.device,
    dtype: torch.dtype,
    quantize: Quantize = "none",
    backend: ModelBackend = "auto",
    speculation: SpeculativeConfig = NO_DRAFTS,
) -> Model:
    """Load a checkpoint of any supported model.

    Raises:
        ConfigError: the checkpoint is invalid or not supported.
    """
    target = LoadTarget(device, dtype, quantize)
    return open_checkpoint(directory, backend, speculation).load(target)
