"""What two nodes compare before one computes on KV that the other made."""

import hashlib
from pathlib import Path

from common.config import ModelBackend, SpeculationConfig
from engine.models.checkpoint import Checkpoint, StoredTensor, content
from engine.models.choice import NO_DRAFTS, Servable, open_checkpoint


def fingerprint(
    directory: Path,
    backend: ModelBackend = "auto",
    speculation: SpeculationConfig = NO_DRAFTS,
) -> dict[str, str]:
    """Field -> value; equal where the models are, wherever they lie and however they are sharded:
    those of `constants`, and `weights`, their name. The dtype computed in is the node's, not the
    model's.

    Raises:
        ConfigError: as `load`.
    """
    servable = open_checkpoint(directory, backend, speculation)
    weights = content(stored_of(servable, directory))
    return {**constants(servable), "weights": weights.hex()}


def constants(servable: Servable) -> dict[str, str]:
    """What no other weights change. `architecture`; `model_backend`: the way it is computed;
    `config`: sha256 of all numbers the forward uses; `drafter`: who has KV beside it."""
    return {
        "architecture": servable.spec.architecture,
        "model_backend": servable.backend,
        "config": servable.config_hash(),
        "drafter": servable.drafter,
    }


def stored_of(servable: Servable, directory: Path) -> dict[str, StoredTensor]:
    """The stored tensors that make the model, by name. Raises ConfigError: they do not."""
    tensors = Checkpoint(directory).tensors
    return {name: tensors[name] for name in sorted(servable.stored())}


def tokenizer_hash(directory: Path) -> str:
    """sha256 of tokenizer.json, as the router hashes its own; "" where there is none."""
    path = directory / "tokenizer.json"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
