"""Drafters with their own checkpoint: EAGLE heads and draft models.

An EAGLE head is a draft layer in the layout of its authors, vLLM and SGLang. It uses the embedding
and the token head of the target model.

A draft model is a smaller decoder with the same vocabulary, which drafts from tokens only. The KV
of its layers is in the same pages as the target model's, after it. It is therefore available
wherever the target model's KV is: in the prefix cache, in offload tiers, and on the next node.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from common.errors import ConfigError
from engine.batch.forward import ForwardBatch
from engine.kv_cache.kv import KVPool
from engine.kv_cache.states import DraftState
from engine.models.blocks.attention import Attention
from engine.models.blocks.layer import LayerSite, ModelStep
from engine.models.checkpoint import Checkpoint, content, stored_names
from engine.models.decoder import Decoder
from engine.models.drafting import (
    BodySpec,
    DraftHead,
    DraftLayer,
    DraftSpec,
    Eagle3Spec,
    InnerNorms,
    ModelVectors,
    one_token,
    view_of,
)
from engine.models.families import common, read_decoder
from engine.models.fields import Fields
from engine.models.linear import form_of
from engine.models.quantized import scheme_of
from engine.models.refill import refill
from engine.models.spec import LoadTarget, ModelSpec
from engine.models.vision.seeing import VisionInput
from engine.models.weights import StoredDecoder, TensorInventory, TensorNeeds, TensorReader

DRAFT_FLAG = "engine.speculative.draft_model"
_UNUSED = ("embed_tokens.", "lm_head.", "t2d")  # copies of the target model's own, or unused
_JOIN = "fc"
_TAPS = "eagle_aux_hidden_state_layer_ids"
_MIDDLE = "midlayer.hidden_norm.weight"


class EagleCheckpoint:
    """The checkpoint of an EAGLE head."""

    def __init__(self, directory: Path, model: ModelSpec) -> None:
        """Read the configuration.

        Args:
            model: the target model.
        Raises:
            ConfigError: the configuration is invalid, or is for another target model.
        """
        config = Fields.of(directory / "config.json")
        _check(config, model, directory)
        self._checkpoint, self._scheme = Checkpoint(directory), scheme_of(config)
        self._hidden_size = model.hidden_size
        self.spec: DraftSpec | Eagle3Spec
        if any("eagle3" in name.lower() for name in _architectures(config)):
            self.spec = _third(config, model, self._checkpoint)
        else:
            self.spec = _first(config, self._checkpoint)

    def weight_bytes(self, target: LoadTarget) -> int:
        return self._survey(target).num_bytes

    def load(self, model: Decoder) -> DraftHead:
        """Load the layer for a target model. See LoadableModel."""
        return model.drafting(self._layer(model.target))

    def refill(self, model: Decoder) -> None:
        """Read the weights of the drafter again, after `drain`."""
        assert isinstance(model.drafter, DraftHead)
        refill(model.drafter.layer, self._layer(model.target))

    def added_to(self, model: ModelSpec) -> ModelSpec:
        return replace(model, draft=self.spec.keeps(model.hidden_size))

    def name(self) -> str:
        """Return a name with a hash of its configuration and of all bytes of its weights."""
        needs = self._survey(LoadTarget(torch.device("cpu"), torch.float32))
        stored = {name: self._checkpoint.tensors[name] for name in sorted(needs.stored)}
        hashed = hashlib.sha256(repr(self.spec).encode() + content(stored))
        return f"eagle {hashed.hexdigest()}"

    def _layer(self, target: LoadTarget) -> DraftLayer:
        self._survey(target)
        reader = TensorReader(target, self._checkpoint, self._scheme, form_of(target))
        return self.spec.build(LayerSite(reader, self._hidden_size))

    def _survey(self, target: LoadTarget) -> TensorNeeds:
        source = TensorInventory(target, self._checkpoint, self._scheme, form_of(target))
        self.spec.build(LayerSite(source, self._hidden_size))
        self._checkpoint.check(source.needs.stored, self._scheme.ignored, _UNUSED)
        return source.needs


def _check(config: Fields, model: ModelSpec, directory: Path) -> None:
    kind, layers = config.text("model_type"), config.integer("num_hidden_layers")
    if kind != "llama":
        found = ", ".join(_architectures(config)) or kind
        raise ConfigError(
            f"{DRAFT_FLAG}: {directory} is {found}; EAGLE heads of model_type llama are supported"
        )
    if layers != 1:
        raise config.wrong("num_hidden_layers", "1: an EAGLE head is one layer")
    for name, here in (("hidden_size", model.hidden_size), ("vocab_size", model.vocabulary_size)):
        if config.integer(name) != here:
            raise config.wrong(name, f"{here}, as in the target model")


def _architectures(config: Fields) -> tuple[str, ...]:
    return config.texts("architectures") if "architectures" in config else ()


def _attention(config: Fields) -> Attention:
    bias = config.flag("attention_bias", False)
    return common.attention(config, common.even_head_dim(config), bias=bias)


def _body(config: Fields, mixer: Attention, prefix: str) -> BodySpec:
    ffn = common.dense(config, bias=config.flag("mlp_bias", False))
    return BodySpec(mixer, ffn, common.norm(config), prefix)


def _first(config: Fields, checkpoint: Checkpoint) -> DraftSpec:
    """Return the spec of an EAGLE or EAGLE-2 layer. EAGLE-2 only differs in the number of
    drafts."""
    return DraftSpec(
        body=_body(config, _attention(config), "layers.0."),
        prefix="",
        join=_JOIN,
        join_bias=f"{_JOIN}.bias" in checkpoint.tensors,
        inner_norms=InnerNorms(),
        input_norm=False,
    )


def _third(config: Fields, model: ModelSpec, checkpoint: Checkpoint) -> Eagle3Spec:
    eagle, count = config.nested("eagle_config"), len(model.layers)
    if not eagle.flag("use_aux_hidden_state", True):
        raise eagle.wrong("use_aux_hidden_state", "true")
    taps = eagle.counts(_TAPS) or (2, count // 2, count - 3)
    if not all(0 <= tap < count for tap in taps):
        raise eagle.wrong(_TAPS, f"layers of the model's {count}")
    return Eagle3Spec(
        body=_body(
            config,
            replace(_attention(config), of_two=True),
            "midlayer." if _MIDDLE in checkpoint.tensors else "layers.0.",
        ),
        taps=taps,
        vocabulary=model.vocabulary_size,
        known=config.integer("draft_vocab_size", model.vocabulary_size),
        mapped="d2t" in checkpoint.tensors,
        normed_residual=config.flag("norm_before_residual", False),
    )


class DraftModelCheckpoint:
    """The checkpoint of a draft model of a native family."""

    def __init__(self, directory: Path, model: ModelSpec) -> None:
        """Read the configuration.

        Args:
            model: the target model.
        Raises:
            ConfigError: the configuration is invalid or not supported, or is for another target
                model.
        """
        spec = read_decoder(directory, stored_names(directory))
        self._weights, own = StoredDecoder(directory, spec), spec.model
        if own.vocabulary_size != model.vocabulary_size:
            raise ConfigError(
                f"{DRAFT_FLAG}: {directory} has {own.vocabulary_size} tokens in its vocabulary, "
                f"and the model {model.vocabulary_size}: a draft model needs the same vocabulary"
            )
        for reason, refused in {
            "it has no language model head": not own.generates,
            "draft models with images are not supported": VisionInput.of(directory) is not None,
            "draft models with recurrent states are not supported": any(
                layer.cells for layer in own.layers
            ),
        }.items():
            if refused:
                raise ConfigError(f"{DRAFT_FLAG}: {directory} is {own.architecture}: {reason}")

    def added_to(self, model: ModelSpec) -> ModelSpec:
        own = self._weights.spec.model
        products = model.products_per_token + own.products_per_token
        return replace(model, draft=DraftState(own.layers), products_per_token=products)

    def name(self) -> str:
        """Return a name with a hash of its configuration and of all bytes of its weights."""
        tensors, spec = Checkpoint(self._weights.directory).tensors, self._weights.spec
        hashed = hashlib.sha256(repr(spec).encode())
        hashed.update(content({name: tensors[name] for name in sorted(self._weights.stored())}))
        return f"draft_model {hashed.hexdigest()}"

    def weight_bytes(self, target: LoadTarget) -> int:
        return self._weights.weight_bytes(_of_drafter(target))

    def load(self, model: Decoder) -> "DraftModel":
        """Load the draft model for a target model. See LoadableModel."""
        return DraftModel(self._weights.load(_of_drafter(model.target)))

    def refill(self, model: Decoder) -> None:
        """Read the weights of the drafter again, after `drain`."""
        assert isinstance(model.drafter, DraftModel)
        self._weights.refill(model.drafter.decoder)


def _of_drafter(target: LoadTarget) -> LoadTarget:
    """Return the draft model's own target. Its experts are always divided between ranks."""
    share = replace(target.share, whole_experts=False, placement=None)
    return replace(target, share=share)


class DraftModel:
    """A draft model that runs after the target model, see DeviceDrafter."""

    taps: tuple[int, ...] = ()

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    @property
    def parts(self) -> Sequence[object]:
        return self.decoder.parts

    def follow(
        self, step: ModelStep, seen: ModelVectors, future_tokens: Tensor, pool: KVPool
    ) -> None:
        batch = step.batch
        if step.late is not None and step.late.guessed:
            lasts = batch.query_starts[1:].long() - 1
            batch = one_token(batch, batch.token_ids, lasts, batch.lengths)
        self._run(batch, future_tokens, pool)

    def before(self, batch: ForwardBatch, pool: KVPool) -> Tensor:
        """Return undefined vectors, because a draft model continues from the KV of the tokens."""
        decoder, rows = self.decoder, batch.num_rows
        size, dtype = decoder.spec.hidden_size, decoder.dtype
        return torch.empty(rows, size, dtype=dtype, device=decoder.device)

    def advance(
        self, one: ForwardBatch, vectors: Tensor, future_tokens: Tensor, pool: KVPool
    ) -> Tensor:
        norm = self.decoder.ends.norm
        assert norm is not None
        hidden, _ = norm.forward(*self._run(one, future_tokens, pool))
        return hidden

    def logits(self, vectors: Tensor) -> Tensor:
        return self.decoder.logits(vectors)

    def _run(
        self, batch: ForwardBatch, future_tokens: Tensor, pool: KVPool
    ) -> tuple[Tensor, Tensor | None]:
        """Store the KV of a step's tokens. Return the output of the layers, see LayerByLayer."""
        x = self.decoder.embedded(batch.token_ids, future_tokens)
        return self.decoder.stack.forward(x, None, ModelStep(batch), view_of(pool), None)
