"""The model fingerprint. Two nodes compare it before one computes on the other's KV."""

import hashlib
from pathlib import Path

from common.config import ModelBackend, SpeculativeConfig
from engine.models.checkpoint import Checkpoint, StoredTensor, content
from engine.models.choice import NO_DRAFTS, LoadableModel, open_checkpoint


def fingerprint(
    directory: Path,
    backend: ModelBackend = "auto",
    speculation: SpeculativeConfig = NO_DRAFTS,
) -> dict[str, str]:
    """Return field -> value. The result is equal for equal models, independent of their location
    and shards.

    It has the fields of `constants`, and `weights`, the hash of the weights. The compute dtype
    belongs to the node and is not included.

    Raises:
        ConfigError: as `load`.
    """
    servable = open_checkpoint(directory, backend, speculation)
    weights = content(stored_of(servable, directory))
    return {**constants(servable), "weights": weights.hex()}


def constants(servable: LoadableModel) -> dict[str, str]:
    """Return the fields that do not change with the weights.

    They are `architecture`, `model_backend`, `config` (sha256 of all numbers that the forward
    uses), and `drafter` (the draft layer that also has KV).
    """
    return {
        "architecture": servable.spec.architecture,
        "model_backend": servable.backend,
        "config": servable.config_hash(),
        "drafter": servable.drafter,
    }


def stored_of(servable: LoadableModel, directory: Path) -> dict[str, StoredTensor]:
    """Return the stored tensors that make the model, by name. Raises ConfigError if they are
    incomplete."""
    tensors = Checkpoint(directory).tensors
    return {name: tensors[name] for name in sorted(servable.stored())}


def tokenizer_hash(directory: Path) -> str:
    """Return the sha256 of tokenizer.json, as the router computes it, or "" if there is no such
    file."""
    path = directory / "tokenizer.json"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
