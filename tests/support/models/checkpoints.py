"""Tiny random checkpoints of every supported architecture, with a byte-level tokenizer.

transformers makes them and is also the oracle: `greedy_tokens` returns what it generates.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers.utils.logging
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.models import ModelSpec, constants, content, open_checkpoint, stored_of

transformers.utils.logging.disable_progress_bar()

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma2")
HYBRID_ARCHITECTURES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
EXPERT_ARCHITECTURES = ("qwen3_moe", "qwen2_moe", "mixtral", "dots1", "gpt_oss")
LATENT_ARCHITECTURES = ("deepseek_v2", "deepseek_v3")
NATIVE_ARCHITECTURES = (
    *ARCHITECTURES,
    "gemma3_text",
    *HYBRID_ARCHITECTURES,
    *EXPERT_ARCHITECTURES,
    *LATENT_ARCHITECTURES,
)
GEMMA_3_LAYERS = [*("sliding_attention",) * 2, "full_attention", "sliding_attention"]
TENSORS = "model.safetensors"
SPECIAL_TOKENS = ("<|end|>", "<|start|>")
END_TOKEN_ID = 256  # after the 256 bytes
VOCABULARY_SIZE = 320  # includes ids that the tokenizer lacks, as in real checkpoints

CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

SIZES = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": END_TOKEN_ID,
}
HYBRID_SIZES = {
    "head_dim": 32,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
EXPERT_SIZES = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
}
_DEEPSEEK_EXPERTS = {
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
}
_DEEPSEEK = {
    **_DEEPSEEK_EXPERTS,
    "num_key_value_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_FEW_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 24}
# Fields of single architectures, in addition to SIZES.
_OWN_SIZES: Mapping[str, Mapping[str, object]] = {
    "mistral": {"sliding_window": None},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32, **EXPERT_SIZES},
    "qwen2_moe": EXPERT_SIZES,
    "qwen3_next": {**HYBRID_SIZES, **EXPERT_SIZES},
    "qwen3_5_text": HYBRID_SIZES,
    "qwen3_5_moe_text": {**HYBRID_SIZES, **EXPERT_SIZES},
    "gpt_oss": {**_FEW_EXPERTS, "sliding_window": 40, "head_dim": 32},
    "mixtral": _FEW_EXPERTS,
    "dots1": _DEEPSEEK_EXPERTS,
    "deepseek_v2": {**_DEEPSEEK, "topk_method": "group_limited_greedy", "norm_topk_prob": False},
    "deepseek_v3": _DEEPSEEK,
    "gemma2": {**_GEMMA, "sliding_window": 40},
    "gemma3_text": {
        **_GEMMA,
        "sliding_window": 24,
        "num_hidden_layers": 4,
        "layer_types": GEMMA_3_LAYERS,
    },
}


def make_checkpoint(
    directory: Path,
    architecture: str = "qwen3",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    made_by: type = AutoModelForCausalLM,
    **overrides: object,
) -> Path:
    """Write config, weights, generation config and tokenizer. Returns `directory`.

    Matrices are twice as large as transformers draws them, so that greedy choices have margins well
    above rounding differences. Queries and keys are larger still: attention then selects single
    tokens, and one wrong page of KV changes the output.

    Args:
        dtype: dtype of the stored weights. They are drawn in float32.
        made_by: auto class of transformers, which decides the head.
        overrides: fields of the architecture's configuration.
    """
    sizes = {**SIZES, **_OWN_SIZES.get(architecture, {}), **overrides}
    config = CONFIG_MAPPING[architecture](**sizes)
    torch.manual_seed(seed)
    model = made_by.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and not name.endswith("_bias"):
                parameter.mul_(2.0)
            else:  # norms of 1 and biases of 0 would hide that they are ignored
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if any(part in name for part in ("q_proj", "k_proj", "q_b_proj", "kv_a_proj")):
                parameter.mul_(4.0)
            if ".experts." in name or name.endswith("mlp.gate.weight"):
                parameter.mul_(4.0)  # to detect wrong experts and routing weights
            if "q_norm" in name or "k_norm" in name:
                parameter.mul_(2.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)
    model.to(dtype).save_pretrained(directory, max_shard_size=max_shard_size)
    make_tokenizer(directory)
    return directory


def read_spec(directory: Path) -> ModelSpec:
    return open_checkpoint(directory).spec


def fingerprint(directory: Path, *how: Any, **drafting: Any) -> dict[str, str]:
    """Return what nodes compare of a model and its weights. `how`: see `open_checkpoint`."""
    loadable = open_checkpoint(directory, *how, **drafting)
    weights = content(stored_of(loadable, directory))
    return {**constants(loadable), "weights": weights.hex()}


def make_tokenizer(directory: Path) -> None:
    """Write a tokenizer in which every byte is a token with its own value, without merges."""
    vocabulary = {letter: byte for byte, letter in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL_TOKENS[0])
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)


def edit_config(directory: Path, name: str = "config.json", /, **changes: object) -> None:
    """Change fields of a JSON file. The value ... removes a field."""
    path = directory / name
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in fields.items() if value is not ...}))


def edit_tensors(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the stored tensors of a checkpoint, by name."""
    path = directory / TENSORS
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def to_transformers_4(directory: Path) -> None:
    """Rewrite config.json to the format of transformers 4."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config))


def reference_model(directory: Path, kind: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """Load transformers' model with eager attention in float32. EOS does not end its `generate`.

    Args:
        kind: class of transformers that loads it.
    """
    model = kind.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)
    model.generation_config.eos_token_id = None
    model.eval()
    return model


def greedy_tokens(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[list[int]]:
    """Return the tokens that `model` generates for each prompt, one prompt at a time."""
    generated = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        generated.append(out[0, len(prompt) :].tolist())
    return generated


def confirmed_tokens(
    model: PreTrainedModel, prompt: Sequence[int], guessed: Sequence[int]
) -> list[int]:
    """Return the tokens that `model` generates greedily, as many as are guessed.

    A right guess costs one forward, where `greedy_tokens` needs one for each token.
    """
    tokens: list[int] = []
    while len(tokens) < len(guessed):
        text = [*prompt, *tokens, *guessed[len(tokens) : -1]]
        with torch.no_grad():
            logits = model(torch.tensor([text])).logits[0, len(prompt) + len(tokens) - 1 :]
        for token, guess in zip(logits.argmax(-1).tolist(), guessed[len(tokens) :], strict=True):
            tokens.append(token)
            if token != guess:
                break
    return tokens
