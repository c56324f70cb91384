"""The weights of a dense decoder as the forward wants them: Q, K, V fused, gate and up fused."""

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
    """Matrices are [out, in]; None where the architecture has none.

    Norms are what multiplies, whatever is stored; in float32 where that is not what is stored.
    """

    input_norm: Tensor
    qkv: Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]: Q, K, V
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    attention_post_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor  # [2 * intermediate, hidden]: gate, up
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    mlp_post_norm: Tensor | None


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
    shapes: _Shapes = {f"{name}.weight": (hidden,) for name in _norm_names(spec).values()}
    for name, (rows, columns, bias) in linear.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    if spec.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (spec.head_dim,)
    return shapes


def _norm_names(spec: ModelSpec) -> dict[str, str]:
    """Field of LayerWeights -> stored name; the same name is another norm in other models."""
    if not spec.post_norms:
        return {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    return {
        "input_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }


def load_weights(
    checkpoint: Checkpoint, spec: ModelSpec, device: torch.device, dtype: torch.dtype
) -> Weights:
    """Reads the model's tensors onto `device`, one layer of them in host memory at a time.

    Raises:
        ConfigError: as `stored_tensors`.
    """
    reader = _Reader(checkpoint, spec, device, dtype)
    embedding = reader.read("model.embed_tokens.weight")
    return Weights(
        embedding=embedding,
        layers=tuple(
            _load_layer(f"model.layers.{layer}.", reader) for layer in range(spec.num_layers)
        ),
        norm=reader.read_norm("model.norm.weight"),
        head=embedding if spec.tied_embeddings else reader.read(_HEAD),
    )


class _Reader:
    """Reads a checkpoint's tensors as the forward wants them."""

    def __init__(
        self, checkpoint: Checkpoint, spec: ModelSpec, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.spec = spec
        self._names = stored_tensors(checkpoint, spec)
        self._checkpoint = checkpoint
        self._device = device
        self._dtype = dtype

    def read(self, *parts: str) -> Tensor:
        tensors = [self._checkpoint.read(name) for name in parts]
        whole = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
        return own_copy(whole, self._device, self._dtype)

    def read_if_any(self, *parts: str) -> Tensor | None:
        return self.read(*parts) if parts[0] in self._names else None

    def read_norm(self, name: str) -> Tensor:
        if not self.spec.norms_from_one:
            return self.read(name)
        # A small difference would drown in the rounding of 1 + it to 16 bits.
        return own_copy(self._checkpoint.read(name).float() + 1, self._device, torch.float32)

    def read_norm_if_any(self, name: str) -> Tensor | None:
        return self.read_norm(name) if name in self._names else None


def _load_layer(prefix: str, reader: _Reader) -> LayerWeights:
    read, read_if_any = reader.read, reader.read_if_any
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    qkv = [f"{attention}{name}_proj" for name in "qkv"]
    gate_up = [f"{mlp}gate_proj", f"{mlp}up_proj"]
    norms = {
        field: reader.read_norm(f"{prefix}{name}.weight")
        for field, name in _norm_names(reader.spec).items()
    }
    return LayerWeights(
        input_norm=norms["input_norm"],
        qkv=read(*(f"{name}.weight" for name in qkv)),
        qkv_bias=read_if_any(*(f"{name}.bias" for name in qkv)),
        q_norm=reader.read_norm_if_any(f"{attention}q_norm.weight"),
        k_norm=reader.read_norm_if_any(f"{attention}k_norm.weight"),
        output=read(f"{attention}o_proj.weight"),
        output_bias=read_if_any(f"{attention}o_proj.bias"),
        attention_post_norm=norms.get("attention_post_norm"),
        mlp_norm=norms["mlp_norm"],
        gate_up=read(*(f"{name}.weight" for name in gate_up)),
        gate_up_bias=read_if_any(*(f"{name}.bias" for name in gate_up)),
        down=read(f"{mlp}down_proj.weight"),
        down_bias=read_if_any(f"{mlp}down_proj.bias"),
        mlp_post_norm=norms.get("mlp_post_norm"),
    )
