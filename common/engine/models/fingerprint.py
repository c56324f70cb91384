"""What two nodes compare before one computes on KV that the other made."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from xxhash import xxh3_128

from common.config import ModelBackend
from common.engine.models.checkpoint import Checkpoint, StoredTensor
from common.engine.models.choice import Servable, open_checkpoint
from common.requests.weights import WeightsId

_BLOCK_BYTES = 8 << 20


def fingerprint(directory: Path, backend: ModelBackend = "auto") -> dict[str, str]:
    """Field -> value; equal where the models are, wherever they lie and however they are sharded:
    those of `constants`, and `weights`, their name. The dtype computed in is the node's, not the
    model's.

    Raises:
        ConfigError: as `load`.
    """
    servable = open_checkpoint(directory, backend)
    weights = content(stored_of(servable, directory))
    return {**constants(servable), "weights": weights.hex()}


def constants(servable: Servable) -> dict[str, str]:
    """What no other weights change. `architecture`; `model_backend`: the way it is computed;
    `config`: sha256 of all numbers the forward uses."""
    return {
        "architecture": servable.spec.architecture,
        "model_backend": servable.backend,
        "config": servable.config_hash(),
    }


def stored_of(servable: Servable, directory: Path) -> dict[str, StoredTensor]:
    """The stored tensors that make the model, by name. Raises ConfigError: they do not."""
    tensors = Checkpoint(directory).tensors
    return {name: tensors[name] for name in sorted(servable.stored())}


def content(stored: Mapping[str, StoredTensor]) -> WeightsId:
    """Reads all of their bytes, and names them.

    Raises:
        OSError: a file cannot be read, or is cut off.
    """
    digest = xxh3_128()
    for name, tensor in stored.items():
        digest.update(f"{name} {tensor.shape} {tensor.dtype}\n".encode())
        for block in tensor.blocks(_BLOCK_BYTES):
            digest.update(block)
    return digest.digest()


def tokenizer_hash(directory: Path) -> str:
    """sha256 of tokenizer.json, as the router hashes its own; "" where there is none."""
    path = directory / "tokenizer.json"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
