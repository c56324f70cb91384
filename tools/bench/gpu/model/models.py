"""Models by name with random weights: on the device, or as a checkpoint for processes."""

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.models.blocks.source import BlockWeights
from engine.models.checkpoint import FLOATS
from engine.models.decoder import Decoder, DecoderSpec
from engine.models.families import read_decoder
from engine.models.linear import Linear, Matrix, MatrixPart
from engine.models.linear.dense import DenseLinear, StackedLinear
from engine.models.quantized.experts import ExpertShape
from engine.models.spec import LoadTarget
from engine.ranks import ExpertPart
from kernels.layers.by_head import HeadMatrices


def _qwen3(
    hidden: int, inner: int, layers: int, heads: int, *, tied: bool = True, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    } | more


CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16),
    "Qwen3-4B": _qwen3(2560, 9728, 36, 32),
    "Qwen3-8B": _qwen3(4096, 12288, 36, 32, tied=False),
    "Llama-3-8B": _qwen3(
        4096,
        14336,
        32,
        32,
        tied=False,
        model_type="llama",
        architectures=["LlamaForCausalLM"],
        vocab_size=128256,
        max_position_embeddings=131072,  # as in Llama 3.1: enough for every prompt here
        rms_norm_eps=1e-5,
        rope_theta=5e5,
    ),
    "tiny": _qwen3(
        64,
        96,
        2,
        4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=320,
        max_position_embeddings=2048,
        torch_dtype="float32",
    ),
}
SERVED = "Qwen3-4B"  # large enough to hide a transfer behind a prefill


def spec_of(name: str) -> DecoderSpec:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(CONFIGS[name]))
        return read_decoder(Path(directory))


def random_model(name: str, device: torch.device, dtype: torch.dtype) -> tuple[Decoder, int]:
    """Return the model, and the weight bytes that every decode step must read.

    An input embedding counts only if it is also the head.
    """
    spec, source = spec_of(name), RandomWeights(LoadTarget(device, dtype), drawn=dtype)
    decoder, sizes = spec.build(source), spec.model
    embedding = sizes.vocabulary_size * sizes.hidden_size * dtype.itemsize
    return decoder, sum(source.num_bytes) - (0 if spec.tied_embeddings else embedding)


def shallow(spec: DecoderSpec, layers: int) -> DecoderSpec:
    """Return the model's first `layers` layers only."""
    model = replace(spec.model, layers=spec.model.layers[:layers])
    return replace(spec, model=model, layers=spec.layers[:layers])


def write_checkpoint(directory: Path, name: str, device: torch.device) -> Path:
    """Write config, random weights and a tokenizer in transformers' format. Returns `directory`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.support.models.checkpoints import make_tokenizer

    config = AutoConfig.for_model(**CONFIGS[name])
    with torch.device(device), torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, dtype=spec_of(name).model.dtype)
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)
            else:
                parameter.normal_(1.0, 0.1)
    model.save_pretrained(directory)
    make_tokenizer(directory)
    return directory


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomWeights(BlockWeights):
    """Weights that keep the size of activations from layer to layer, made on the device.

    Attributes:
        dtype: dtype in which they are stored.
        drawn: dtype to which they are rounded.
        num_bytes: bytes of each tensor so far.
    """

    drawn: torch.dtype
    num_bytes: list[int] = field(default_factory=list)

    def by_head(self, weights: Tensor) -> HeadMatrices:
        raise NotImplementedError("no model of this benchmark has latents")

    def experts(self, shape: ExpertShape, part: ExpertPart) -> StackedLinear:
        raise NotImplementedError("no model of this benchmark has experts")

    def scale(self, name: str) -> float:
        return 1.0

    def tied(self, embedding: Tensor) -> Linear:
        return DenseLinear(embedding)

    def norm(self, name: str, size: int, *, from_one: bool) -> Tensor:
        return self._draw((size,), 1.0, 0.1)

    def tidy(self) -> None:
        """Do nothing, because drawing needs little temporary memory."""

    def _stored(
        self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = FLOATS
    ) -> Tensor:
        return self._draw(shape, 0.0, 0.1 if name.endswith(".bias") else 1.0)

    def _matrix(self, module: str, part: MatrixPart) -> Matrix:
        return Matrix(self._draw((part.rows, part.columns), 0.0, part.columns**-0.5))

    def _product(self, parts: Mapping[str, MatrixPart], biases: Sequence[Tensor]) -> Linear:
        count = sum(part.rows for part in parts.values())
        columns = next(iter(parts.values())).columns
        bias = torch.cat([*biases]) if biases else None
        return DenseLinear(self._draw((count, columns), 0.0, columns**-0.5), bias)

    def _draw(self, shape: tuple[int, ...], mean: float, deviation: float) -> Tensor:
        drawn = torch.empty(shape, dtype=self.drawn, device=self.device).normal_(mean, deviation)
        self.num_bytes.append(math.prod(shape) * self.dtype.itemsize)
        return drawn.to(self.dtype)
