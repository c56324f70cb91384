"""Tiny random checkpoints of any class for which transformers has a causal language model.

Made from the class's default configuration, with every size field set to a small value. Only
classes whose sizes must match each other have settings of their own here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.support.models.checkpoints import END_TOKEN_ID, VOCABULARY_SIZE, make_tokenizer

CONTEXT = 512
WINDOW = 24  # tokens of windows, and of attention by chunks
_HIDDEN, _INNER, _HEADS, _LAYERS, _EXPERTS = 64, 96, 4, 4, 8
# Names of fields in configurations, by value.
_NAMES = (
    (VOCABULARY_SIZE, "vocab_size"),
    (_HIDDEN, "hidden_size n_embd d_model embed_dim word_embed_proj_dim embedding_size"),
    (_INNER, "intermediate_size intermediate_size_mlp dense_intermediate_size n_inner d_ff dff"),
    (_INNER, "mlp_intermediate_size ffn_hidden_size ffn_dim decoder_ffn_dim encoder_ffn_dim"),
    (32, "moe_intermediate_size expert_intermediate_size expert_ffn_hidden_size"),
    (32, "shared_intermediate_size shared_expert_intermediate_size"),
    (32, "moe_shared_expert_intermediate_size kv_lora_rank q_lora_rank"),
    (_LAYERS, "num_hidden_layers n_layer num_layers n_layers decoder_layers"),
    (2, "encoder_layers num_key_value_heads n_group"),
    (_HEADS, "num_attention_heads n_head n_heads num_heads"),
    (_HEADS, "decoder_attention_heads encoder_attention_heads"),
    (16, "head_dim kv_channels d_kv v_head_dim qk_nope_head_dim"),
    (8, "qk_rope_head_dim"),
    (24, "qk_head_dim"),
    (CONTEXT, "max_position_embeddings n_positions n_ctx seq_length max_seq_len"),
    (WINDOW, "sliding_window attention_chunk_size"),
    (_EXPERTS, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (2, "num_experts_per_tok num_experts_per_token moe_k moe_topk top_k_experts"),
    (1, "n_shared_experts topk_group first_k_dense_replace bos_token_id decoder_start_token_id"),
    (0, "pad_token_id"),
    (END_TOKEN_ID, "eos_token_id"),
    (True, "is_decoder"),
)
_SIZES = {name: value for value, names in _NAMES for name in names.split()}
# Further settings that a class needs to be tiny.
_OWN: Mapping[str, Mapping[str, object]] = {
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 2,
                       "ffn_act_fn": {"name": "silu"}},
    },
    "deepseek_v2": {"topk_method": "greedy"},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCABULARY_SIZE,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": None,
    },
    "gemma4_text": {
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCABULARY_SIZE,
    },
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0}
            for kind in ("full_attention", "sliding_attention")
        },
    },
    "xmod": {"default_language": "en_XX"},
}  # fmt: skip


def tiny_config(kind: str, **own: object) -> PreTrainedConfig:
    """Return a small configuration.

    Args:
        kind: a model_type.
        own: fields to override.
    """
    made = CONFIG_MAPPING[kind]
    defaults = made().to_dict()
    fields = _small(defaults) | dict(_OWN.get(kind, {}))
    for name, nested in defaults.items():
        if name == "text_config":
            fields[name] = {"model_type": nested.get("model_type"), **_small(nested)}
        elif name.endswith("vision_config") and "num_hidden_layers" in (nested or {}):
            fields[name] = nested | {"num_hidden_layers": 1}
    return made(**(fields | own))


def _small(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce sizes. Every kind of layer is kept, with at least two of each."""
    fields = {name: size for name, size in _SIZES.items() if _is_size(defaults, name)}
    if "qk_rope_head_dim" in defaults:  # every head has its own key, computed from a shared latent
        fields |= {"num_key_value_heads": _HEADS}
        if "head_dim" in fields:
            fields["head_dim"] = fields["qk_rope_head_dim"]
    for name, kinds in defaults.items():
        if name.endswith("layer_types") and isinstance(kinds, list) and kinds:
            fields[name] = (list(dict.fromkeys(kinds)) * _LAYERS)[:_LAYERS]
    return fields


def _is_size(defaults: Mapping[str, Any], name: str) -> bool:
    return name in defaults and not isinstance(defaults[name], (dict, list))


def make_tiny(directory: Path, kind: str, *, seed: int = 0, **own: object) -> Path:
    """Write config, weights and a byte-level tokenizer with transformers.

    Matrices are twice as large as drawn, as in `checkpoints.make_checkpoint`.
    """
    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(kind, **own), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2.0)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    make_tokenizer(directory)
    return directory
