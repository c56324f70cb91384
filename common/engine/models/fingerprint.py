"""What two nodes compare before one computes on KV that the other made."""

import hashlib
from pathlib import Path

from common.config import ModelBackend
from common.engine.models.checkpoint import Checkpoint
from common.engine.models.choice import open_checkpoint

_SAMPLE_BYTES = 4096


def fingerprint(directory: Path, backend: ModelBackend = "auto") -> dict[str, str]:
    """Field -> value; equal where the models are, wherever they lie and however they are sharded.

    `architecture`; `model_backend`: the way it is computed; `config`: sha256 of all numbers the
    forward uses; `weights`: sha256 over name, shape, dtype and 4 KiB of every tensor. The dtype
    computed in is the node's, not the model's.

    Raises:
        ConfigError: as `load`.
    """
    servable = open_checkpoint(directory, backend)
    checkpoint = Checkpoint(directory)
    weights = hashlib.sha256()
    for name in sorted(servable.stored()):
        stored = checkpoint.tensors[name]
        weights.update(f"{name} {stored.shape} {stored.dtype}\n".encode())
        weights.update(stored.sample(_SAMPLE_BYTES))
    return {
        "architecture": servable.spec.architecture,
        "model_backend": servable.backend,
        "config": servable.config_hash(),
        "weights": weights.hexdigest(),
    }


def tokenizer_hash(directory: Path) -> str:
    """sha256 of tokenizer.json, as the router hashes its own; "" where there is none."""
    path = directory / "tokenizer.json"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
