"""The weights of a dense decoder as the forward wants them: Q, K, V fused, gate and up fused."""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.config import Quantize
from common.engine.models.checkpoint import Checkpoint, own_copy
from common.engine.models.linear import Form, Linear, form_of
from common.engine.models.spec import ModelSpec
from common.process.allocator import trim

_Shapes = dict[str, tuple[int, ...]]
# Old Llama checkpoints store the inverse frequencies; they follow from the configuration.
_IGNORED = frozenset({".rotary_emb.inv_freq"})
_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """None where the architecture has none.

    Norms are what multiplies, whatever is stored; in float32 where that is not what is stored.
    """

    input_norm: Tensor
    qkv: Linear  # hidden -> (heads + 2 * kv_heads) * head_dim: Q, K, V
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    output: Linear
    attention_post_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Linear  # hidden -> 2 * intermediate: gate, up
    down: Linear
    mlp_post_norm: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    embedding: Tensor  # [vocabulary, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Linear  # hidden -> vocabulary


def stored_tensors(checkpoint: Checkpoint, spec: ModelSpec) -> _Shapes:
    """Names and shapes of the stored tensors that make the model, checked against `checkpoint`.

    Raises:
        ConfigError: missing or unexpected tensors, wrong shapes or dtypes.
    """
    hidden = (spec.hidden_size,)
    shapes: _Shapes = {
        _EMBEDDING: (spec.vocabulary_size, spec.hidden_size),
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


def weight_bytes(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    quantize: Quantize = "none",
) -> int:
    """What `load_weights` takes.

    Raises:
        ConfigError: as `stored_tensors` and `form_of`.
    """
    form, taken = form_of(device, dtype, quantize), 0
    for name, shape in stored_tensors(checkpoint, spec).items():
        if len(shape) == 1:
            size = 4 if spec.norms_from_one and name.endswith("norm.weight") else dtype.itemsize
            taken += shape[0] * size
        elif name == _EMBEDDING:
            taken += shape[0] * shape[1] * dtype.itemsize
            taken += form.tied_bytes(*shape) if spec.tied_embeddings else 0
        else:
            taken += form.num_bytes(*shape)
    return taken


def load_weights(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    quantize: Quantize = "none",
) -> Weights:
    """Reads the model's tensors onto `device`, one matrix of them twice in memory at a time.

    Raises:
        ConfigError: as `stored_tensors` and `form_of`.
    """
    reader = _Reader(checkpoint, spec, device, dtype, form_of(device, dtype, quantize))
    # The largest first: nothing else is there yet while they are there twice.
    embedding = reader.read(_EMBEDDING)
    head = reader.form.tied(embedding) if spec.tied_embeddings else reader.linear("lm_head")
    return Weights(
        embedding=embedding,
        layers=tuple(
            _load_layer(f"model.layers.{layer}.", reader) for layer in range(spec.num_layers)
        ),
        norm=reader.read_norm("model.norm.weight"),
        head=head,
    )


class _Reader:
    """Reads a checkpoint's tensors as the forward wants them."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        device: torch.device,
        dtype: torch.dtype,
        form: Form,
    ) -> None:
        self.spec = spec
        self.form = form
        self._names = stored_tensors(checkpoint, spec)
        self._checkpoint = checkpoint
        self._device = device
        self._dtype = dtype

    def read(self, *parts: str) -> Tensor:
        return own_copy(self._stored(*parts), self._device, self._dtype)

    def linear(self, *parts: str) -> Linear:
        """The matrices and biases of these modules as one, output after output."""
        biases = [f"{name}.bias" for name in parts]
        bias = self.read(*biases) if biases[0] in self._names else None
        return self.form.hold(self._stored(*(f"{name}.weight" for name in parts)), bias)

    def read_norm(self, name: str) -> Tensor:
        if not self.spec.norms_from_one:
            return self.read(name)
        # A small difference would drown in the rounding of 1 + it to 16 bits.
        return own_copy(self._checkpoint.read(name).float() + 1, self._device, torch.float32)

    def read_norm_if_any(self, name: str) -> Tensor | None:
        return self.read_norm(name) if name in self._names else None

    def _stored(self, *parts: str) -> Tensor:
        tensors = [self._checkpoint.read(name) for name in parts]
        return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


def _load_layer(prefix: str, reader: _Reader) -> LayerWeights:
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    norms = {
        field: reader.read_norm(f"{prefix}{name}.weight")
        for field, name in _norm_names(reader.spec).items()
    }
    layer = LayerWeights(
        input_norm=norms["input_norm"],
        qkv=reader.linear(*(f"{attention}{name}_proj" for name in "qkv")),
        q_norm=reader.read_norm_if_any(f"{attention}q_norm.weight"),
        k_norm=reader.read_norm_if_any(f"{attention}k_norm.weight"),
        output=reader.linear(f"{attention}o_proj"),
        attention_post_norm=norms.get("attention_post_norm"),
        mlp_norm=norms["mlp_norm"],
        gate_up=reader.linear(f"{mlp}gate_proj", f"{mlp}up_proj"),
        down=reader.linear(f"{mlp}down_proj"),
        mlp_post_norm=norms.get("mlp_post_norm"),
    )
    trim()  # what packing and widening have left between the matrices that stay
    return layer
