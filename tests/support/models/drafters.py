"""Drafters with a known accuracy, and checkpoints with draft heads."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.batch.batch import Ints
from engine.speculative import DraftPolicy, Speculator
from tests.support.models.checkpoints import TENSORS, edit_config, make_checkpoint
from tests.support.models.vision import make_vision_checkpoint

Foretell = Callable[[list[int], int], list[int]]  # returns the next `count` tokens after these
KINDS = ("right", "wrong", "random")
_TO_RESIDUAL = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
FOLLOWED_SIZE = 320  # hidden size of a `make_followed` model, equal to its vocabulary


class Guesser:
    """A drafter that returns foretold tokens. Each is wrong with the probability `wrong`."""

    def __init__(self, foretell: Foretell, vocabulary_size: int, wrong: float, seed: int = 0):
        self._foretell = foretell
        self._vocabulary_size = vocabulary_size
        self._wrong = wrong
        self._random = random.Random(seed)

    def propose(self, tokens: Ints, count: int) -> Ints:
        guessed = np.array(self._foretell(tokens.tolist(), count), np.int32)
        others = [self._random.random() < self._wrong for _ in guessed]
        return np.where(others, (guessed + 1) % self._vocabulary_size, guessed).astype(np.int32)


def recall(answers: Sequence[Sequence[int]]) -> Foretell:
    """Return a Foretell that knows these texts (prompts and responses) and no others."""

    def foretell(tokens: list[int], count: int) -> list[int]:
        for text in answers:
            if list(text[: len(tokens)]) == tokens:
                return list(text[len(tokens) : len(tokens) + count])
        return []

    return foretell


def speculator(
    kind: str, foretell: Foretell, vocabulary_size: int, max_drafts: int = 4, seed: int = 0
) -> Speculator:
    wrong = {"right": 0.0, "wrong": 1.0, "random": 0.3}[kind]
    drafter = Guesser(foretell, vocabulary_size, wrong, seed)
    return Speculator(drafter, DraftPolicy(max_drafts), max_drafts)


def make_eagle(directory: Path, model: Path, *, seed: int = 0, bias: bool = False) -> Path:
    """Write a random EAGLE head for a model with Llama's sizes. Returns `directory`."""
    config = json.loads((model / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or hidden // heads
    random = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=random) * 1.5 * columns**-0.5

    tensors = {
        "fc.weight": matrix(hidden, 2 * hidden),
        "layers.0.self_attn.q_proj.weight": 3 * matrix(heads * size, hidden),
        "layers.0.self_attn.k_proj.weight": 3 * matrix(kv_heads * size, hidden),
        "layers.0.self_attn.v_proj.weight": matrix(kv_heads * size, hidden),
        "layers.0.self_attn.o_proj.weight": matrix(hidden, heads * size),
        "layers.0.post_attention_layernorm.weight": 1 + 0.1 * matrix(1, hidden)[0],
        "layers.0.mlp.gate_proj.weight": matrix(inner, hidden),
        "layers.0.mlp.up_proj.weight": matrix(inner, hidden),
        "layers.0.mlp.down_proj.weight": matrix(hidden, inner),
        "embed_tokens.weight": matrix(config["vocab_size"], hidden),  # stored, but not used
    }
    if bias:
        tensors["fc.bias"] = matrix(1, hidden)[0]
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / TENSORS)
    head = config | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "head_dim": size,
    }
    (directory / "config.json").write_text(json.dumps(head))
    return directory


def make_eagle3(directory: Path, model: Path, *, seed: int = 0) -> Path:
    """Write a random EAGLE-3 head for a model with Llama's sizes. It knows every second token.

    Returns `directory`.
    """
    make_eagle(directory, model, seed=seed)
    config = json.loads((directory / "config.json").read_text())
    hidden, known = config["hidden_size"], config["vocab_size"] // 2
    random = torch.Generator().manual_seed(seed)
    tensors = {
        name.replace("layers.0.", "midlayer."): tensor
        for name, tensor in load_file(directory / TENSORS).items()
        if name.startswith("layers.0.")
    }
    for name in ("q_proj", "k_proj", "v_proj"):
        whole = f"midlayer.self_attn.{name}.weight"
        tensors[whole] = torch.cat((tensors[whole], tensors[whole].roll(3, 0)), dim=1)
    for norm in ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm"):
        tensors[f"{norm}.weight"] = 1 + 0.1 * torch.randn(hidden, generator=random)
    tensors["fc.weight"] = torch.randn(hidden, 3 * hidden, generator=random) * hidden**-0.5
    tensors["lm_head.weight"] = torch.randn(known, hidden, generator=random)
    tensors["d2t"] = torch.arange(known) + 1  # number n is token 2n + 1
    tensors["t2d"] = torch.arange(2 * known) % 2 == 1
    save_file(tensors, directory / TENSORS)
    edit_config(directory, architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=known)
    return directory


def make_draft(directory: Path, model: Path, *, architecture: str = "llama", seed: int = 1) -> Path:
    """Write a random draft model with the vocabulary of `model`. Returns `directory`."""
    vocabulary_size = json.loads((model / "config.json").read_text())["vocab_size"]
    layers = {} if architecture == "gemma3_text" else {"num_hidden_layers": 3}
    fields = {"vocab_size": vocabulary_size, "hidden_size": 48, "head_dim": 12, **layers}
    return make_checkpoint(directory, architecture, seed=seed, **fields)


def make_mtp(model: Path, *, seed: int = 0) -> Path:
    """Add a random draft layer, like the last layer, to a DeepSeek-V3 checkpoint."""
    config = json.loads((model / "config.json").read_text())
    hidden, number = config["hidden_size"], config["num_hidden_layers"]
    tensors = load_file(model / TENSORS)
    mine = f"model.layers.{number}."
    random = torch.Generator().manual_seed(seed)
    own = _shaken(tensors, f"model.layers.{number - 1}.", mine, random)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        own[f"{mine}{norm}.weight"] = 1 + 0.1 * torch.randn(hidden, generator=random)
    join = torch.randn(hidden, 2 * hidden, generator=random)
    own[f"{mine}eh_proj.weight"] = join * 1.5 * (2 * hidden) ** -0.5
    own[f"{mine}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    own[f"{mine}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors | own, model / TENSORS, {"format": "pt"})
    edit_config(model, num_nextn_predict_layers=1)
    return model


def make_hybrid_mtp(model: Path, *, seed: int = 0) -> Path:
    """Add a random draft layer to a Qwen3-Next or Qwen3.5 with attention at its end.

    The model may have an image encoder.
    """
    config = json.loads((model / "config.json").read_text())
    prefix = "model.language_model." if "text_config" in config else "model."
    config = config.get("text_config", config)
    hidden, last = config["hidden_size"], config["num_hidden_layers"] - 1
    tensors = load_file(model / TENSORS)
    random = torch.Generator().manual_seed(seed)
    own = _shaken(tensors, f"{prefix}layers.{last}.", "mtp.layers.0.", random)
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        own[f"mtp.{norm}.weight"] = 0.1 * torch.randn(hidden, generator=random)
    join = torch.randn(hidden, 2 * hidden, generator=random)
    own["mtp.fc.weight"] = join * 1.5 * (2 * hidden) ** -0.5
    save_file(tensors | own, model / TENSORS, {"format": "pt"})
    return model


def _shaken(
    tensors: dict[str, Tensor], prefix: str, renamed: str, random: torch.Generator
) -> dict[str, Tensor]:
    """Return random tensors like those with `prefix`, named with `renamed`."""

    def shaken(tensor: Tensor) -> Tensor:
        noise = torch.randn(tensor.shape, generator=random)
        return tensor + noise * tensor.std() if tensor.numel() > 1 else tensor

    return {
        name.replace(prefix, renamed): shaken(tensor)
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def make_followed(directory: Path, architecture: str = "llama") -> Path:
    """Write a model whose next token is a permutation of the last token, whatever precedes it.

    Its hidden vectors are the embeddings of the tokens. Returns `directory`.
    """
    size = FOLLOWED_SIZE
    make_checkpoint(directory, architecture, hidden_size=size, num_attention_heads=4, head_dim=80)
    return _followed(directory, "model.", float(architecture == "llama"))


def _followed(directory: Path, prefix: str, norm: float) -> Path:
    """Change the weights of a decoder. `norm`: stored value of norms that only scale."""
    tensors = load_file(directory / TENSORS)
    for name, tensor in tensors.items():
        if name.startswith(prefix) and name.endswith(_TO_RESIDUAL):
            tensor.zero_()
        elif name.startswith(prefix) and name.endswith("norm.weight"):
            tensor.fill_(norm)  # other architectures than Llama store the difference from 1
    tensors[f"{prefix}embed_tokens.weight"] = torch.eye(FOLLOWED_SIZE)
    tensors["lm_head.weight"] = _permutation()
    save_file(tensors, directory / TENSORS, {"format": "pt"})
    return directory


def make_follower(directory: Path, model: Path) -> Path:
    """Write the EAGLE head that drafts correctly for a `make_followed` model.

    It computes the vector of the token from the vector of the previous token, without using the
    token itself.
    """
    make_eagle(directory, model)
    tensors = load_file(directory / TENSORS)
    size = FOLLOWED_SIZE
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"layers.0.{name}.weight"].zero_()
    tensors["fc.weight"] = torch.cat((torch.zeros(size, size), _permutation()), dim=1)
    save_file(tensors, directory / TENSORS)
    return directory


def make_knower(directory: Path, model: Path) -> Path:
    """Write the EAGLE head that knows a `make_followed` model, whatever is sampled: it computes the
    model's vector from the token."""
    make_follower(directory, model)
    tensors, size = load_file(directory / TENSORS), FOLLOWED_SIZE
    epsilon = json.loads((model / "config.json").read_text())["rms_norm_eps"]
    normed = torch.eye(size) * (1 / size + epsilon) ** -0.5
    tensors["fc.weight"] = torch.cat((normed, torch.zeros(size, size)), dim=1)
    save_file(tensors, directory / TENSORS)
    return directory


def make_followed_hybrid(directory: Path) -> Path:
    """Write a Qwen3-Next that behaves like `make_followed`, with a correct draft layer."""
    return _with_follower(make_followed(directory, "qwen3_next"))


def make_followed_vision(directory: Path) -> Path:
    """Write a Qwen3.5 with an image encoder that otherwise behaves like `make_followed_hybrid`."""
    sizes = {"hidden_size": FOLLOWED_SIZE, "head_dim": 80}
    make_vision_checkpoint(directory, model_type="qwen3_5", **sizes)
    return _with_follower(_followed(directory, "model.language_model.", 0.0))


def _with_follower(directory: Path) -> Path:
    make_hybrid_mtp(directory)
    tensors = load_file(directory / TENSORS)
    for name, tensor in tensors.items():
        if name.startswith("mtp.") and name.endswith((*_TO_RESIDUAL, "norm.weight")):
            tensor.zero_()
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{norm}.weight"].zero_()
    size = FOLLOWED_SIZE
    tensors["mtp.fc.weight"] = torch.cat((torch.zeros(size, size), _permutation()), dim=1)
    save_file(tensors, directory / TENSORS, {"format": "pt"})
    return directory


def _permutation() -> Tensor:
    """Return a permutation as a matrix [next token, token]."""
    order = torch.randperm(FOLLOWED_SIZE, generator=torch.Generator().manual_seed(3))
    return torch.eye(FOLLOWED_SIZE)[order]
