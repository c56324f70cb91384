"""What two nodes compare before one computes on KV that the other made."""

import dataclasses
import hashlib
import json
from pathlib import Path

from common.engine.models.checkpoint import Checkpoint
from common.engine.models.config import read_spec
from common.engine.models.weights import stored_tensors

_SAMPLE_BYTES = 4096
# KV does not depend on these: nodes may differ in them.
_NOT_COMPARED = ("architecture", "dtype", "eos_token_ids")


def fingerprint(directory: Path) -> dict[str, str]:
    """Field -> value; equal where the models are, wherever they lie and however they are sharded.

    `architecture`; `config`: sha256 of all numbers the forward uses; `weights`: sha256 over name,
    shape, dtype and 4 KiB of every tensor. The dtype computed in is the node's, not the model's.

    Raises:
        ConfigError: as `load`.
    """
    spec = read_spec(directory)
    essentials = {
        field.name: getattr(spec, field.name)
        for field in dataclasses.fields(spec)
        if field.name not in _NOT_COMPARED
    }
    essentials["rope"] = dataclasses.astuple(spec.rope)
    config = hashlib.sha256(json.dumps(essentials, sort_keys=True).encode())
    checkpoint = Checkpoint(directory)
    weights = hashlib.sha256()
    for name in sorted(stored_tensors(checkpoint, spec)):
        stored = checkpoint.tensors[name]
        weights.update(f"{name} {stored.shape} {stored.dtype}\n".encode())
        weights.update(stored.sample(_SAMPLE_BYTES))
    return {
        "architecture": spec.architecture,
        "config": config.hexdigest(),
        "weights": weights.hexdigest(),
    }


def tokenizer_hash(directory: Path) -> str:
    """sha256 of tokenizer.json, as the router hashes its own; "" where there is none."""
    path = directory / "tokenizer.json"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
