"""Models by name with random weights: on the device at once, or as a checkpoint for programs."""

import json
import tempfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from common.engine.models import read_spec
from common.engine.models.decoder import DenseDecoder
from common.engine.models.linear import Linear
from common.engine.models.linear.dense import Dense
from common.engine.models.spec import ModelSpec
from common.engine.models.weights import LayerWeights, Weights

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "torch_dtype": "bfloat16",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen3-4B": {
        **_QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "Llama-3-8B": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,  # the window of 3.1: room for every prompt here
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    "tiny": {
        **_QWEN3,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 320,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    },
}


SERVED = "Qwen3-4B"  # by whole systems: large enough for a transfer to hide behind a prefill


def spec_of(name: str) -> ModelSpec:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(CONFIGS[name]))
        return read_spec(Path(directory))


def random_weights(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Weights:
    """Such that activations keep their size from layer to layer."""

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        made = torch.empty(rows, columns, dtype=dtype, device=device)
        return made.normal_(0.0, scale * columns**-0.5)

    def linear(rows: int, columns: int) -> Dense:
        return Dense(matrix(rows, columns))

    def norm(size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_(1.0, 0.1)

    hidden, inner = spec.hidden_size, spec.intermediate_size
    attended = spec.num_heads * spec.head_dim
    embedding = matrix(spec.vocabulary_size, hidden, scale=hidden**0.5)
    layers = []
    for _ in range(spec.num_layers):
        tensors: dict[str, Any] = {field.name: None for field in fields(LayerWeights)}
        tensors |= {
            "input_norm": norm(hidden),
            "qkv": linear(attended + 2 * spec.kv_heads * spec.head_dim, hidden),
            "output": linear(hidden, attended),
            "mlp_norm": norm(hidden),
            "gate_up": linear(2 * inner, hidden),
            "down": linear(hidden, inner),
        }
        if spec.qk_norm:
            tensors |= {"q_norm": norm(spec.head_dim), "k_norm": norm(spec.head_dim)}
        layers.append(LayerWeights(**tensors))
    head = embedding if spec.tied_embeddings else matrix(spec.vocabulary_size, hidden)
    return Weights(embedding, tuple(layers), norm(hidden), Dense(head))


def random_model(name: str, device: torch.device, dtype: torch.dtype) -> tuple[DenseDecoder, int]:
    """The model, and the bytes of weights that every decode step must read: all but an input
    embedding that is not the head too."""
    spec = spec_of(name)
    weights = random_weights(spec, device, dtype)
    parts: list[Tensor | Linear] = [weights.norm, weights.head]
    for layer in weights.layers:
        parts += _parts(layer).values()
    return DenseDecoder(spec, weights), sum(part.nbytes for part in parts)


def shallow(spec: ModelSpec, layers: int) -> ModelSpec:
    """The model's first layers only."""
    return replace(spec, num_layers=layers, windows=spec.windows[:layers])


def widened(weights: Weights) -> Weights:
    """The same weights in float32."""
    return Weights(
        embedding=weights.embedding.float(),
        layers=tuple(
            replace(layer, **{key: part.float() for key, part in _parts(layer).items()})
            for layer in weights.layers
        ),
        norm=weights.norm.float(),
        head=cast(Dense, weights.head).float(),
    )


def write_checkpoint(directory: Path, name: str, device: torch.device) -> Path:
    """Config, random weights and a tokenizer, as transformers writes them; returns `directory`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.support.checkpoints import make_tokenizer

    config = AutoConfig.for_model(**CONFIGS[name])
    with torch.device(device), torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, dtype=spec_of(name).dtype)
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)
            else:
                parameter.normal_(1.0, 0.1)
    model.save_pretrained(directory)
    make_tokenizer(directory)
    return directory


def _parts(layer: LayerWeights) -> dict[str, Any]:
    """Norms and matrices, those that the architecture has."""
    named = {field.name: getattr(layer, field.name) for field in fields(layer)}
    return {name: part for name, part in named.items() if part is not None}
