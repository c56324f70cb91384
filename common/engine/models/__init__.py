"""Models: from a directory to something that computes logits."""

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from common.config import Quantize
from common.engine.memory.kv import KVPool
from common.engine.models.checkpoint import Checkpoint
from common.engine.models.config import read_spec
from common.engine.models.decoder import DenseDecoder
from common.engine.models.fingerprint import fingerprint, tokenizer_hash
from common.engine.models.spec import ModelSpec
from common.engine.models.weights import load_weights
from common.engine.rows.forward import ForwardBatch

__all__ = [
    "Model",
    "ModelSpec",
    "fingerprint",
    "load",
    "read_spec",
    "tokenizer_hash",
]


class Model(Protocol):
    """What the runner needs of a model."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def forward(self, batch: ForwardBatch, pool: KVPool, future_tokens: Tensor) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


def load(
    directory: Path, device: torch.device, dtype: torch.dtype, quantize: Quantize = "none"
) -> Model:
    """Loads a checkpoint of any supported architecture.

    Raises:
        ConfigError: what is wrong with the directory, or not supported.
    """
    spec = read_spec(directory)
    return DenseDecoder(spec, load_weights(Checkpoint(directory), spec, device, dtype, quantize))
