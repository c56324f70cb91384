"""The weights of a dense decoder as the forward wants them: Q, K, V fused, gate and up fused."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.models.checkpoint import Checkpoint, own_copy
from common.engine.models.spec import ModelSpec

_Shapes = dict[str, tuple[int, ...]]
# Old Llama checkpoints store the inverse frequencies; they follow from the configuration.
_IGNORED = frozenset({".rotary_emb.inv_freq"})
_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """Matrices are [out, in]; None where the architecture has none."""

    input_norm: Tensor
    qkv: Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]: Q, K, V
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor  # [2 * intermediate, hidden]: gate, up
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    embedding: Tensor  # [vocabulary, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor  # [vocabulary, hidden]; the embedding itself where they are tied


def stored_tensors(checkpoint: Checkpoint, spec: ModelSpec) -> _Shapes:
    """Names and shapes of the stored tensors that make the model, checked against `checkpoint`.

    Raises:
        ConfigError: missing or unexpected tensors, wrong shapes or dtypes.
    """
    hidden = (spec.hidden_size,)
    shapes: _Shapes = {
        "model.embed_tokens.weight": (spec.vocabulary_size, spec.hidden_size),
        "model.norm.weight": hidden,
    }
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + name: shape for name, shape in _layer_shapes(spec).items()}
    ignored = _IGNORED
    if spec.tied_embeddings:
        ignored |= {_HEAD}
    else:
        shapes[_HEAD] = (spec.vocabulary_size, spec.hidden_size)
    checkpoint.check(shapes, ignored)
    return shapes


def _layer_shapes(spec: ModelSpec) -> _Shapes:
    hidden, intermediate = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_heads * spec.head_dim, spec.kv_heads * spec.head_dim
    linear = {
        "self_attn.q_proj": (q, hidden, spec.qkv_bias),
        "self_attn.k_proj": (kv, hidden, spec.qkv_bias),
        "self_attn.v_proj": (kv, hidden, spec.qkv_bias),
        "self_attn.o_proj": (hidden, q, spec.output_bias),
        "mlp.gate_proj": (intermediate, hidden, spec.mlp_bias),
        "mlp.up_proj": (intermediate, hidden, spec.mlp_bias),
        "mlp.down_proj": (hidden, intermediate, spec.mlp_bias),
    }
    shapes: _Shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, (rows, columns, bias) in linear.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    if spec.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (spec.head_dim,)
    return shapes


def load_weights(
    checkpoint: Checkpoint, spec: ModelSpec, device: torch.device, dtype: torch.dtype
) -> Weights:
    """Reads the model's tensors onto `device`, one layer of them in host memory at a time.

    Raises:
        ConfigError: as `stored_tensors`.
    """
    names = stored_tensors(checkpoint, spec)

    def read(*parts: str) -> Tensor:
        tensors = [checkpoint.read(name) for name in parts]
        return own_copy(torch.cat(tensors) if len(tensors) > 1 else tensors[0], device, dtype)

    def read_if_any(*parts: str) -> Tensor | None:
        return read(*parts) if parts[0] in names else None

    embedding = read("model.embed_tokens.weight")
    return Weights(
        embedding=embedding,
        layers=tuple(
            _load_layer(f"model.layers.{layer}.", read, read_if_any)
            for layer in range(spec.num_layers)
        ),
        norm=read("model.norm.weight"),
        head=embedding if spec.tied_embeddings else read(_HEAD),
    )


def _load_layer(
    prefix: str, read: Callable[..., Tensor], read_if_any: Callable[..., Tensor | None]
) -> LayerWeights:
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    qkv = [f"{attention}{name}_proj" for name in "qkv"]
    gate_up = [f"{mlp}gate_proj", f"{mlp}up_proj"]
    return LayerWeights(
        input_norm=read(f"{prefix}input_layernorm.weight"),
        qkv=read(*(f"{name}.weight" for name in qkv)),
        qkv_bias=read_if_any(*(f"{name}.bias" for name in qkv)),
        q_norm=read_if_any(f"{attention}q_norm.weight"),
        k_norm=read_if_any(f"{attention}k_norm.weight"),
        output=read(f"{attention}o_proj.weight"),
        output_bias=read_if_any(f"{attention}o_proj.bias"),
        mlp_norm=read(f"{prefix}post_attention_layernorm.weight"),
        gate_up=read(*(f"{name}.weight" for name in gate_up)),
        gate_up_bias=read_if_any(*(f"{name}.bias" for name in gate_up)),
        down=read(f"{mlp}down_proj.weight"),
        down_bias=read_if_any(f"{mlp}down_proj.bias"),
    )
