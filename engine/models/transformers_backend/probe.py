"""Detection of the KV that a class's layers keep, and of their attention.

The class is built without weights, on torch's meta device, and computes one token. Its attention
calls then show each layer's parameters.

A transformers class requests a mask once per forward and passes it to its layers. The probe returns
a description of the visible keys instead of the mask, derived from the rule that would fill the
mask.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as fx_config
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from engine.models.transformers_backend.plan import UnsupportedModel

_FURTHEST = 1 << 17  # the probed query position. Larger windows are not detected
_QUERIES = (
    *range(40),
    *(
        near
        for exponent in range(6, 17)
        for near in range((1 << exponent) - 2, (1 << exponent) + 3)
    ),
    _FURTHEST,
)

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class MaskRange:
    """The keys that a query attends to: its own and those before it, optionally limited to a
    window.

    Attributes:
        limit: number of tokens up to which this is correct. None: no limit.
    """

    window: int | None = None
    limit: int | None = None

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedModel("its layers modify the attention mask")


def seen_by(rule: Rule, chunk: int | None) -> MaskRange:
    """Return the keys that a mask rule makes visible.

    Args:
        rule: function of batch, head, query and key, like transformers' mask functions.
        chunk: tokens per chunk that attends only to itself, if the configuration has such chunks.
    Raises:
        UnsupportedModel: the rule is not supported.
    """
    try:
        counts = {query: _count(rule, query) for query in _QUERIES}
    except (RuntimeError, IndexError):
        reason = "its attention mask depends on more than positions"
    else:
        widest = counts[_FURTHEST]
        if all(count == min(query + 1, widest) for query, count in counts.items()):
            return MaskRange(window=widest if widest <= _FURTHEST else None)
        reason = "its attention mask is neither causal nor a sliding window"
    if chunk is None:
        raise UnsupportedModel(reason)
    return MaskRange(limit=chunk)


def _count(rule: Rule, query: int) -> int:
    """Return the number of keys that the query attends to.

    Raises:
        UnsupportedModel: it attends to a later key, or not to the keys directly before it.
    """
    zero = torch.zeros((), dtype=torch.int64)
    keys = torch.arange(query + 2)
    visible = rule(zero, zero, torch.tensor(query), keys).expand(keys.shape)
    count = int(visible.count_nonzero())
    if bool(visible[query + 1]) or not bool(visible[query + 1 - count : query + 1].all()):
        raise UnsupportedModel("its attention mask is not causal, or skips recent tokens")
    return count


NAME = "baton_probe"
_MAX_HEAD_DIM = 256  # of the attention kernels
_CALLS = "probed_calls"
# Arguments of an attention call that have no effect here.
_HARMLESS = frozenset(
    {
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "is_causal",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


@dataclass(frozen=True, slots=True)
class AttentionProbe:
    """The attention of one layer: query heads, stored KV, and visible tokens.

    Attributes:
        module: name of the module in the class.
        shares: the layer whose KV it reads, which is itself or an earlier one.
        limit: number of tokens up to which `window` is a complete description.
    """

    module: str
    layer: int
    shares: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    limit: int | None

    @property
    def stores(self) -> bool:
        return self.shares == self.layer


@dataclass(frozen=True, slots=True)
class _Call:
    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: object
    scaling: float | None
    others: Mapping[str, object]


class Probe(NamedTuple):
    """The operations of a class for one token.

    Attributes:
        reductions: operations over a whole dimension, such as sums, norms and comparisons, and the
            sizes of their dimensions. Matrix products are not included.
    """

    layers: tuple[AttentionProbe, ...]
    reductions: Sequence[tuple[str, tuple[int, ...]]]


def probe(model: PreTrainedModel, num_layers: int) -> Probe:
    """Compute a token and return the operations of the class.

    Args:
        model: on the meta device.
    Raises:
        UnsupportedModel: the class cannot be served with paged attention.
    """
    calls: list[_Call] = []
    for module in model.modules():
        setattr(module, _CALLS, calls)
    model.set_attn_implementation(NAME)
    token = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    try:
        # Classes that search for experts with tokens find all of them.
        nonzero = fx_config.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]
        with torch.inference_mode(), nonzero, _ReadAsOnes(), _Reductions() as found:  # type: ignore[no-untyped-call]
            # Without a mask, classes detect packed sequences by values, which the meta device does
            # not have.
            model(input_ids=token, attention_mask=torch.ones_like(token), use_cache=False)
    except UnsupportedModel:
        raise
    except Exception as error:
        line = str(error).strip().partition("\n")[0]
        raise UnsupportedModel(
            f"a forward pass of one token without weights failed: {line}"
        ) from error
    if not calls:
        raise UnsupportedModel(
            "it does not use the attention interface of the Transformers library"
        )
    names = {id(module): name for name, module in model.named_modules()}
    first: dict[int, int] = {}
    layers = [_attending(call, names[id(call.module)], first) for call in calls]
    places = [layer.layer for layer in layers]
    for place in places:
        if places.count(place) > 1:
            raise UnsupportedModel(
                f"layer {place} calls attention {places.count(place)} times, expected once"
            )
    if sorted(places) != list(range(num_layers)):
        raise UnsupportedModel(f"{len(places)} of {num_layers} layers call attention, expected all")
    return Probe(tuple(sorted(layers, key=lambda layer: layer.layer)), found.sizes)


class _ReadAsOnes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which a value read from a meta tensor is 1: an expert that exists, or a nonzero
    count."""

    _READS = (
        torch.ops.aten.item.default,
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.is_nonzero.default,
    )

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in self._READS and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype, device="cpu").item()
        return func(*args, **(kwargs or {}))


class _Reductions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that records operations over a whole dimension.

    Attributes:
        sizes: name of each operation, and sizes of its dimensions.
    """

    _NAMES = re.compile(
        "aten::_?(mean|sum|prod|std|var|std_mean|var_mean|cumsum|cumprod|any|all|a?min|a?max|aminmax"
        "|argmin|argmax|sort|argsort|topk|kthvalue|median|logsumexp|(log_)?softmax|norm"
        "|linalg_(vector_)?norm|(native_)?(layer|group)_norm|(fused_)?rms_norm)"
    )

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        name, x = func._schema.name, args[0] if args else None
        compares = "other" in given  # element-wise comparison of two tensors
        if isinstance(x, Tensor) and self._NAMES.fullmatch(name) and not compares:
            self.sizes.append((name, _reduced(x, given)))
        return func(*args, **kwargs)


def _reduced(x: Tensor, given: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the sizes of the dimensions over which an operation with these arguments reduces."""
    if "normalized_shape" in given:
        return tuple(given["normalized_shape"])
    dims = given.get("dim")
    if dims is None:
        return tuple(x.shape)
    return tuple(x.shape[dim] for dim in (dims if isinstance(dims, list | tuple) else [dims]))


def _attending(call: _Call, name: str, first: dict[int, int]) -> AttentionProbe:
    """Return the attention of one call. `first`: key tensor's identity -> the first layer with this
    tensor, updated here. Layers that share KV get the same tensor."""
    module, layer = call.module, getattr(call.module, "layer_idx", None)
    if layer is None:
        raise UnsupportedModel(f"{name} has no layer_idx")
    query, key, value = call.query.shape, call.key.shape, call.value.shape
    heads, kv_heads, head_dim = query[1], key[1], max(key[3], value[3])
    if query[3] != key[3] or heads % kv_heads or value[1] != kv_heads:
        raise UnsupportedModel(f"{name} has numbers or sizes of heads that do not match")
    if head_dim > _MAX_HEAD_DIM:
        raise UnsupportedModel(f"head_dim is {head_dim}, at most {_MAX_HEAD_DIM} is supported")
    if call.scaling is not None and call.scaling <= 0:
        raise UnsupportedModel(f"{name} has a scaling of {call.scaling}, expected more than 0")
    if not getattr(module, "is_causal", True) or call.others.get("is_causal") is False:
        raise UnsupportedModel("its attention is not causal: it is an encoder")
    seen = _seen(call, name)
    for what, said in call.others.items():
        if said is not None and what not in _HARMLESS and what != "sliding_window":
            raise UnsupportedModel(f"its attention uses {what}, which is not supported")
    return AttentionProbe(
        module=name,
        layer=layer,
        shares=first.setdefault(id(call.key), layer),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        window=seen.window,
        limit=seen.limit,
    )


def _seen(call: _Call, name: str) -> MaskRange:
    if isinstance(call.mask, MaskRange):
        return call.mask
    if call.mask is not None:
        raise UnsupportedModel(f"{name} creates its own attention mask")
    window = call.others.get("sliding_window")
    return MaskRange(window if isinstance(window, int) else None)


def _note(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    calls: list[_Call] = getattr(module, _CALLS)
    calls.append(_Call(module, query, key, value, attention_mask, scaling, others))
    batch, heads, tokens, _ = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[3]), None


def _describe(*, mask_function, config, **_: object) -> MaskRange:  # type: ignore[no-untyped-def]
    with _disable_current_modes():
        return seen_by(mask_function, getattr(config, "attention_chunk_size", None))


AttentionInterface.register(NAME, _note)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _describe)
