"""Checkpoints with random weights for CPU benchmarks, made by transformers."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.quantized_checkpoints import awq, requantised
from tools.bench.support.record import say

TINY: dict[str, Any] = {  # as large as the demo model: 3.5 MB of weights
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
}
QWEN3_450M: dict[str, Any] = {  # 449 million parameters: the layers of Qwen3-0.6B, a smaller head
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
INT4_GROUP = 128
QWEN3_SMALL = QWEN3_450M | TINY  # for dry runs


def kept(directory: Path, name: str, dtype: torch.dtype, sizes: dict[str, Any]) -> Path:
    """Return the Qwen3 of that name under `directory`. Makes it unless an earlier run has."""
    model = directory / name
    if not model.exists():
        say(f"making {model} ...")
        directory.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=directory))
        try:
            make_checkpoint(made, dtype=dtype, **sizes)
            _name_every_token(made)
            made.rename(model)  # atomic
        except BaseException:
            shutil.rmtree(made)
            raise
    return model


def in_int4(source: Path) -> Path:
    """Return the checkpoint in AWQ with groups of 128. Makes it unless it exists."""
    model = source.with_name(f"{source.name}-int4")
    if not model.exists():
        say(f"making {model} ...")
        with tempfile.TemporaryDirectory(dir=source.parent) as made:
            quantised, _ = requantised(source, Path(made), awq(INT4_GROUP))
            quantised.rename(model)  # atomic
    return model


def _name_every_token(model: Path) -> None:
    """Give every token a text.

    Tokens without text are not sent to clients, so their arrival could not be measured.
    """
    vocabulary_size = json.loads((model / "config.json").read_text())["vocab_size"]
    file = model / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    names = tokenizer["model"]["vocab"]
    named = {*names.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    names.update({f"Ġ{i}": i for i in range(vocabulary_size) if i not in named})
    file.write_text(json.dumps(tokenizer))


def weight_bytes(model: Path) -> int:
    """Return the bytes of the weights on disk.

    Each step of a dense model with tied embeddings reads all of them.
    """
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))
