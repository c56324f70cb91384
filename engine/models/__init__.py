"""Models: from a directory to something that computes logits."""

from pathlib import Path

import torch

from common.config import ModelBackend, Quantize, SpeculationConfig
from engine.models.checkpoint import content
from engine.models.choice import NO_DRAFTS, Model, Servable, open_checkpoint
from engine.models.fingerprint import constants, fingerprint, stored_of, tokenizer_hash
from engine.models.spec import ModelSpec

__all__ = [
    "Model",
    "ModelSpec",
    "Servable",
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
    """What the engine needs to know of a checkpoint before it is loaded.

    Raises:
        ConfigError: what is wrong with the configuration, or not supported.
    """
    return open_checkpoint(directory).spec


def load(
    directory: Path,
    device: torch.device,
    dtype: torch.dtype,
    quantize: Quantize = "none",
    backend: ModelBackend = "auto",
    speculation: SpeculationConfig = NO_DRAFTS,
) -> Model:
    """Loads a checkpoint of any model that is served.

    Raises:
        ConfigError: what is wrong with the directory, or not supported.
    """
    return open_checkpoint(directory, backend, speculation).load(device, dtype, quantize)
