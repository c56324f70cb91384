"""Models by name with random weights: on the device, or as a checkpoint for processes."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine.models.decoder import Decoder, DecoderSpec
from engine.models.families import read_decoder
from engine.models.spec import LoadTarget
from tools.bench.gpu.model.weights import RandomWeights

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
        "max_position_embeddings": 131072,  # as in Llama 3.1: enough for every prompt here
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
    decoder = spec.build(source)
    embedding = (
        0
        if spec.tied_embeddings
        else spec.model.vocabulary_size * spec.model.hidden_size * dtype.itemsize
    )
    return decoder, source.made.num_bytes - embedding


def shallow(spec: DecoderSpec, layers: int) -> DecoderSpec:
    """Return the model's first `layers` layers only."""
    model = replace(spec.model, layers=spec.model.layers[:layers])
    return replace(spec, model=model, layers=spec.layers[:layers])


def write_checkpoint(directory: Path, name: str, device: torch.device) -> Path:
    """Write config, random weights and a tokenizer in transformers' format. Returns `directory`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.support.checkpoints import make_tokenizer

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
