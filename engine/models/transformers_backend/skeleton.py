"""A class of transformers without weights, built from its configuration, and its properties.

Code in the checkpoint is never run.
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from common.errors import ConfigError
from engine.kv_cache.states import PagedKV, own_heads
from engine.models.families.common import CLASSIFIER
from engine.models.fields import Fields
from engine.models.transformers_backend.plan import (
    ShapeGroup,
    TensorPlan,
    UnsupportedModel,
    connect,
    cut,
)
from engine.models.transformers_backend.probe import AttentionProbe, Probe, probe
from engine.ranks import Share

# Field names of the context length in configurations.
_LENGTHS = ("max_position_embeddings", "max_sequence_length", "max_seq_len", "seq_length")
_SAID = ("hidden_size", "num_hidden_layers", "vocab_size")
_FULL = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
# In these variants, frequencies depend on the longest request of a batch if it exceeds the value of
# this field.
_BY_BATCH = {"dynamic": _LENGTHS[0], "longrope": "original_max_position_embeddings"}


@dataclass(frozen=True, slots=True, eq=False)
class MetaModel:
    """The properties of a class, determined without weights.

    Attributes:
        model: on the meta device.
        plan: how ranks divide the class.
        config: configuration of the text model.
        attending: the layers' attention.
        reductions: see Probe.
        context_length: number of tokens up to which results equal those of the class.
        limited: reason why that is less than in the configuration, or "".
        first_position: position of the first token, in the class's numbering.
    """

    model: PreTrainedModel
    plan: TensorPlan
    config: PreTrainedConfig
    attending: tuple[AttentionProbe, ...]
    reductions: Sequence[tuple[str, tuple[int, ...]]]
    context_length: int
    limited: str
    first_position: int

    @property
    def name(self) -> str:
        return type(self.model).__name__

    @property
    def keeps(self) -> tuple[PagedKV, ...]:
        """The KV of each layer that stores KV."""
        return tuple(
            PagedKV(
                layer.kv_heads, layer.head_dim, layer.window, split=self.plan.splits(layer.module)
            )
            for layer in self._storing
        )

    def place(self, layer: AttentionProbe) -> int:
        """Return the index among `keeps` of the KV that `layer` reads."""
        return [kept.layer for kept in self._storing].index(layer.shares)

    @property
    def products_per_token(self) -> int:
        """Multiplications of a token with matrices of the layers. Only the token's own experts
        count."""
        head = self.model.get_output_embeddings()
        dense = sum(
            rows * columns
            for _, module, rows, columns in products(self.model)
            if module is not head
        )
        stacks = sum(x.numel() for x in self.model.parameters() if x.ndim == 3)
        return dense + int(stacks * self._share_of_experts)

    @property
    def _share_of_experts(self) -> float:
        chosen = getattr(self.config, "num_experts_per_tok", None) or 1
        stacks = [x.shape[0] for x in self.model.parameters() if x.ndim == 3]
        return min(1.0, chosen / max(stacks, default=1))

    @property
    def _storing(self) -> tuple[AttentionProbe, ...]:
        return tuple(layer for layer in self.attending if layer.stores)


def products(model: nn.Module) -> Iterator[tuple[str, nn.Module, int, int]]:
    """Yield the modules that only multiply by a matrix and add a bias: name, module, outputs,
    inputs."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            yield name, module, *module.weight.shape
        elif type(module) is Conv1D:
            yield name, module, *module.weight.shape[::-1]


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the module that computes the states from which the class computes logits.

    Raises:
        UnsupportedModel: there is no such module.
    """
    decoder = model.get_decoder()
    # Some heads have that attribute, too.
    if decoder is not model and isinstance(decoder, PreTrainedModel):
        return decoder
    for child in model.children():
        if isinstance(child, PreTrainedModel):
            return child
    raise UnsupportedModel("its language model head is not a module separate from the decoder")


def skeleton(directory: Path) -> MetaModel:
    """Build the class of a checkpoint without weights.

    Raises:
        ConfigError: the configuration is invalid, or the class cannot be served.
    """
    transformers.logging.set_verbosity_error()
    config = config_of(directory)
    text = config.get_text_config(decoder=True)
    try:
        _refuse_early(config, text)
        model = _without_weights(config)
        return _described(model, text)
    except UnsupportedModel as refused:
        raise ConfigError(f"{directory}: {_name(config)} is not supported: {refused}") from refused


def part_of(whole: MetaModel, config: PreTrainedConfig, share: Share) -> MetaModel:
    """Return the class as a rank has it.

    Args:
        config: configuration of the checkpoint, see `config_of`.
    Raises:
        ConfigError: the ranks cannot divide the class. The error has the reason.
    """
    try:
        if whole.plan.refused:
            raise UnsupportedModel(whole.plan.refused)
        for layer in whole.attending:
            if whole.plan.splits(layer.module):
                share.part(layer.heads, "attention heads")
        model = _without_weights(config)
        cut(model, whole.plan, share)
        connect(model, whole.plan, ShapeGroup(share))
        probed = _probe_part(model, whole)
        if probed.layers != tuple(_own_heads(each, whole.plan, share) for each in whole.attending):
            raise UnsupportedModel("its tensor-parallel plan does not split attention by heads")
        if probed.reductions != whole.reductions:
            raise UnsupportedModel("it adds or compares values that are split between ranks")
    except UnsupportedModel as refused:
        raise ConfigError(
            f"engine.parallel.tp: {whole.name} runs on the Transformers library and cannot be "
            f"split between {share.size} ranks: {refused}"
        ) from refused
    return replace(whole, model=model, attending=probed.layers)


def _probe_part(model: PreTrainedModel, whole: MetaModel) -> Probe:
    try:
        return probe(model, whole.config.num_hidden_layers)
    except UnsupportedModel as error:
        raise UnsupportedModel(
            f"its tensor-parallel plan does not match its configuration: {error}"
        ) from error


def _own_heads(layer: AttentionProbe, plan: TensorPlan, share: Share) -> AttentionProbe:
    if not plan.splits(layer.module):
        return layer
    kv_heads = own_heads(layer.kv_heads, share.rank, share.size)
    return replace(layer, heads=layer.heads // share.size, kv_heads=len(kv_heads))


def config_of(directory: Path) -> PreTrainedConfig:
    """Read the configuration. Raise ConfigError as `skeleton` does."""
    try:
        config = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except (ValueError, OSError, KeyError, TypeError) as error:
        if "auto_map" in Fields.of(directory / "config.json"):
            raise ConfigError(
                f"{directory}: the model needs remote code, which is not supported"
            ) from error
        line = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{directory}: transformers cannot read config.json: {line}") from error
    # The class is built for floats, because the loader converts quantised matrices.
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    return config


def _name(config: PreTrainedConfig) -> str:
    name: str = (config.architectures or [config.model_type])[0]
    return name


def _refuse_early(config: PreTrainedConfig, text: PreTrainedConfig) -> None:
    if any(name.endswith(CLASSIFIER) for name in config.architectures or ()):
        raise UnsupportedModel("classifiers are only supported by native implementations")
    if config.is_encoder_decoder:
        raise UnsupportedModel("encoder-decoder models are not supported")
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedModel(
            f"transformers has no causal language model for {config.model_type!r}"
        )
    if getattr(text, "is_decoder", True) is False and "is_decoder" in text.to_dict():
        raise UnsupportedModel("encoders are not supported")
    strange = set(getattr(text, "layer_types", None) or ()) - _FULL
    if strange:
        raise UnsupportedModel(f"layer types {', '.join(sorted(strange))} are not supported")


def _without_weights(config: PreTrainedConfig) -> PreTrainedModel:
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:
        line = str(error).strip().partition("\n")[0]
        raise UnsupportedModel(f"it cannot be built from its configuration: {line}") from error
    if model._is_stateful:
        raise UnsupportedModel("recurrent states are not supported")
    decoder = decoder_of(model)
    if any(isinstance(module, nn.Conv1d) for module in decoder.modules()):
        raise UnsupportedModel("convolutions over tokens are not supported")
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        raise UnsupportedModel("its forward does not accept position_ids")
    # This implementation chooses experts without values. Serving may use another one.
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")
    return model.eval()


def _described(model: PreTrainedModel, text: PreTrainedConfig) -> MetaModel:
    unsaid = [name for name in _SAID if getattr(text, name, None) is None]
    if unsaid:
        raise UnsupportedModel(f"its configuration lacks {', '.join(unsaid)}")
    attending, reductions = probe(model, text.num_hidden_layers)
    lengths = [value for name in _LENGTHS if (value := getattr(text, name, None))]
    if not lengths:
        raise UnsupportedModel("its configuration has no context length")
    by_layer = {layer.layer: layer for layer in attending}
    if any(by_layer[layer.shares].window != layer.window for layer in attending):
        raise UnsupportedModel("layers that share KV have different sliding windows")
    first_position = _first_position(model)
    length = lengths[0] - first_position
    chunk = min((layer.limit for layer in attending if layer.limit), default=length)
    fixed = min(_rope_limits(text), default=length)
    limited = ""
    if chunk < length:
        limited = f"chunked attention: the context is limited to the first chunk of {chunk} tokens"
    elif fixed < length:
        limited = (
            f"the context is limited to {fixed} tokens, beyond which RoPE depends on the batch"
        )
    length = min(length, chunk, fixed)
    plan = TensorPlan.of(model, {layer.module: layer.kv_heads for layer in attending})
    return MetaModel(model, plan, text, attending, reductions, length, limited, first_position)


def _first_position(model: PreTrainedModel) -> int:
    """Return the position of the first token. RoBERTa-like classes reserve the positions up to that
    of the padding token."""
    kept = [
        module.padding_idx
        for module in decoder_of(model).modules()
        if hasattr(module, "create_position_ids_from_input_ids")
    ]
    if None in kept:
        raise UnsupportedModel("its positions depend on a padding token, and it has none")
    return max(kept, default=-1) + 1


def _rope_limits(text: PreTrainedConfig) -> Iterator[int]:
    """Yield lengths up to which a token's rotation does not depend on the length of other
    requests."""
    rope = getattr(text, "rope_parameters", None) or {}
    for kind in [rope] if "rope_type" in rope else rope.values():
        if kind and (name := _BY_BATCH.get(kind.get("rope_type", ""))) is not None:
            limit: int = kind.get(name) or getattr(text, name, text.max_position_embeddings)
            yield limit
