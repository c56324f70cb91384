"""Drafters of known quality, and checkpoints with draft heads."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.batch.batch import Ints
from engine.speculative import AllDrafts, Speculator
from tests.support.checkpoints import make_checkpoint
from tests.support.vision import make_vision_checkpoint

Foretell = Callable[[list[int], int], list[int]]  # the next so many tokens after these
KINDS = ("right", "wrong", "random")
TENSORS = "model.safetensors"
_TO_RESIDUAL = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
FOLLOWED_SIZE = 320  # hidden numbers of a model of `make_followed`, as many as it has tokens


class Guesser:
    """Says what is foretold; of one token in so many (`wrong`) another one."""

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
    """Foretell whole texts, prompts and responses. Returns no drafts for other texts."""

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
    return Speculator(drafter, AllDrafts(max_drafts), max_drafts)


def make_eagle(directory: Path, model: Path, *, seed: int = 0, bias: bool = False) -> Path:
    """Writes a random EAGLE head for a model of Llama's sizes; returns `directory`."""
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
        "embed_tokens.weight": matrix(config["vocab_size"], hidden),  # as stored, and not used
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
    """Writes a random EAGLE-3 head for a model of Llama's sizes, that knows every second token;
    returns `directory`."""
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
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": known}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def make_draft(directory: Path, model: Path, *, architecture: str = "llama", seed: int = 1) -> Path:
    """Writes a random draft model for a model: another one with its vocabulary; returns
    `directory`."""
    vocabulary_size = json.loads((model / "config.json").read_text())["vocab_size"]
    layers = {} if architecture == "gemma3_text" else {"num_hidden_layers": 3}
    fields = {"vocab_size": vocabulary_size, "hidden_size": 48, "head_dim": 12, **layers}
    return make_checkpoint(directory, architecture, seed=seed, **fields)


def make_mtp(model: Path, *, seed: int = 0) -> Path:
    """Gives a checkpoint of DeepSeek-V3 its layer for drafts, in place, as a random one of its last
    layer's kind; returns `model`."""
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
    (model / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return model


def make_hybrid_mtp(model: Path, *, seed: int = 0) -> Path:
    """The same for a Qwen3-Next or Qwen3.5, whose last layer is one of attention. It may have an
    image encoder."""
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
    """Random tensors like those of that prefix, under another one."""

    def shaken(tensor: Tensor) -> Tensor:
        noise = torch.randn(tensor.shape, generator=random)
        return tensor + noise * tensor.std() if tensor.numel() > 1 else tensor

    return {
        name.replace(prefix, renamed): shaken(tensor)
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def make_followed(directory: Path, architecture: str = "llama") -> Path:
    """Writes a model whose next token is a permutation of the newest one, whatever stands before
    it: its vectors are the tokens' own. Returns `directory`."""
    size = FOLLOWED_SIZE
    make_checkpoint(directory, architecture, hidden_size=size, num_attention_heads=4, head_dim=80)
    return _followed(directory, "model.", float(architecture == "llama"))


def _followed(directory: Path, prefix: str, norm: float) -> Path:
    """Changes the weights of a decoder. `norm`: what is stored of norms that only scale."""
    tensors = load_file(directory / TENSORS)
    for name, tensor in tensors.items():
        if name.startswith(prefix) and name.endswith(_TO_RESIDUAL):
            tensor.zero_()
        elif name.startswith(prefix) and name.endswith("norm.weight"):
            tensor.fill_(norm)  # others than Llama store what they differ from 1
    tensors[f"{prefix}embed_tokens.weight"] = torch.eye(FOLLOWED_SIZE)
    tensors["lm_head.weight"] = _permutation()
    save_file(tensors, directory / TENSORS, {"format": "pt"})
    return directory


def make_follower(directory: Path, model: Path) -> Path:
    """Writes the EAGLE head that is right for a model of `make_followed`: of the vector of the
    token before it makes the vector of the token, and does not look at that itself."""
    make_eagle(directory, model)
    tensors = load_file(directory / TENSORS)
    size = FOLLOWED_SIZE
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"layers.0.{name}.weight"].zero_()
    tensors["fc.weight"] = torch.cat((torch.zeros(size, size), _permutation()), dim=1)
    save_file(tensors, directory / TENSORS)
    return directory


def make_knower(directory: Path, model: Path) -> Path:
    """Writes the EAGLE head that knows a model of `make_followed`, whatever is sampled: of a token
    it makes the vector that the model makes of it."""
    make_follower(directory, model)
    tensors, size = load_file(directory / TENSORS), FOLLOWED_SIZE
    epsilon = json.loads((model / "config.json").read_text())["rms_norm_eps"]
    normed = torch.eye(size) * (1 / size + epsilon) ** -0.5
    tensors["fc.weight"] = torch.cat((normed, torch.zeros(size, size)), dim=1)
    save_file(tensors, directory / TENSORS)
    return directory


def make_followed_hybrid(directory: Path) -> Path:
    """Writes a Qwen3-Next like the model of `make_followed`, with the layer for drafts that is
    right for it, like that of `make_follower`; returns `directory`."""
    return _with_follower(make_followed(directory, "qwen3_next"))


def make_followed_vision(directory: Path) -> Path:
    """Writes a Qwen3.5 with an image encoder that is otherwise like `make_followed_hybrid`."""
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
    """[next token, token]."""
    order = torch.randperm(FOLLOWED_SIZE, generator=torch.Generator().manual_seed(3))
    return torch.eye(FOLLOWED_SIZE)[order]
