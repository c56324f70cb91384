"""Models: load a checkpoint and compute logits with it."""

from pathlib import Path

import torch

from common.config import ModelBackend, Quantize, SpeculativeConfig
from engine.models.checkpoint import content
from engine.models.choice import (
    NO_DRAFTS,
    LoadableModel,
    Model,
    constants,
    fingerprint,
    open_checkpoint,
    stored_of,
    tokenizer_hash,
)
from engine.models.spec import ModelSpec

__all__ = [
    "LoadableModel",
    "Model",
    "ModelSpec",
    "constants",
    "content",
    "fingerprint",
    "load",
    "open_checkpoint",
    "read_spec",
    "stored_of",
    "tokenizer_hash",
]


def read_spec(directory: Path) -> ModelSpec:
    """Return the properties of a checkpoint that the engine needs before loading it.

    Raises:
        ConfigError: the configuration is invalid or not supported.
    """
    return open_checkpoint(directory).spec


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
    return open_checkpoint(directory, backend, speculation).load(device, dtype, quantize)
