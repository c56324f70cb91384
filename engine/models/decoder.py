"""A native decoder: embedding, layers of blocks, head. Independent of the kinds of blocks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from common.errors import ConfigError
from engine.batch.forward import ForwardBatch
from engine.batch.images import VisibleImage
from engine.kv_cache.kv import KVPool
from engine.models.blocks.experts import ExpertsBlock, RecordedExperts, RoutedExperts
from engine.models.blocks.latent import LatentAttentionBlock
from engine.models.blocks.layer import (
    AdaptedLinear,
    LateStates,
    Layer,
    LayerSite,
    LayerSpec,
    ModelStep,
    Norm,
    RmsNorm,
)
from engine.models.blocks.source import BlockWeights
from engine.models.drafting import DraftHead, DraftLayer, DraftSpec, ModelVectors
from engine.models.linear import GatheredLinear, Linear, Product, kept, own_outputs
from engine.models.model import Model
from engine.models.quantized.protocol import PLAIN, Scheme
from engine.models.spec import LoadTarget, ModelSpec
from engine.models.stack import LayerByLayer, Stack, stack_of
from engine.models.vision.seeing import ImageFeatures, ReceivingTower
from engine.ranks import Stage
from kernels.layers.embedding import embed
from kernels.layers.linear import linear
from kernels.layers.soft_cap import soft_cap


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder, layer by layer, as described by its configuration.

    Attributes:
        norm: norm before the head.
        stored: format of quantised matrices in the checkpoint.
        embedding_scale: factor of embeddings, rounded to the compute dtype.
        feature_layers: number of first layers that add image features to their outputs.
        logit_soft_cap: logits are cap * tanh(logit / cap). None: no cap.
        prefix: prefix of the names of the decoder's own tensors. Empty in checkpoints of a decoder
            without a head.
        head: name of the head's matrix.
        unused: prefixes of tensor names that belong to other modules.
        offered: the checkpoint's draft layer, which is not part of the decoder.
        drafter: the draft layer that is part of the decoder.
    """

    model: ModelSpec
    layers: tuple[LayerSpec, ...]
    norm: Norm
    tied_embeddings: bool
    embedding_scale: float = 1.0
    logit_soft_cap: float | None = None
    feature_layers: int = 0
    stored: Scheme = PLAIN
    prefix: str = "model."
    head: str = "lm_head"
    unused: tuple[str, ...] = ()
    offered: DraftSpec | None = field(default=None, repr=False)
    drafter: DraftSpec | None = None

    def drafting(self, drafter: DraftSpec) -> "DecoderSpec":
        draft = drafter.keeps(self.model.hidden_size)
        return replace(self, model=replace(self.model, draft=draft), drafter=drafter)

    def build(self, source: BlockWeights) -> "Decoder":
        *parts, drafter = self.parts(source)
        embedding, head, classes, *layers, norm = parts
        return Decoder(
            self,
            DecoderEnds(embedding, head, classes, norm),
            tuple(layers),
            source.target,
            products=[each for each in source.products if self._adaptable(each)],
            drafter=drafter,
        )

    def parts(self, source: BlockWeights) -> Iterator[Any]:
        """Yield embedding, head, classes, layers, norm and drafter. Each is created when it is
        requested. A pipeline stage yields None for parts that belong to the other stage."""
        hidden, share = self.model.hidden_size, source.share
        site = LayerSite(source, hidden)
        if share.is_first_stage:
            yield from self._first_parts(source)
        else:
            yield from (None, None, None)
        for number in share.layers(len(self.layers)):
            yield self.layers[number].build(site.within(f"{self.prefix}layers.{number}."))
        last = share.is_last_stage
        yield self.norm.build(source, f"{self.prefix}norm", hidden) if last else None
        yield None if self.drafter is None or not last else self.drafter.build(site)

    def _first_parts(self, source: BlockWeights) -> Iterator[Any]:
        shape = self.model.vocabulary_size, self.model.hidden_size
        # The largest part first: it exists twice while it is created, and no other memory is in use
        # yet.
        embedding = source.tensor(f"{self.prefix}embed_tokens.weight", shape)
        yield embedding
        yield self._head(source, embedding)
        del embedding
        yield self._classes(source)

    def _adaptable(self, product: Product) -> bool:
        drafts = self.drafter is not None and any(
            name.startswith(self.drafter.prefix) for name in product.parts
        )
        return self.head not in product.parts and not drafts

    def _head(self, source: BlockWeights, embedding: Tensor) -> Linear | None:
        if not self.model.generates:
            return None
        rows, group = self.model.vocabulary_size, source.share.group
        own = (own_outputs(rows, source.share),)
        if self.tied_embeddings:
            head = source.tied(kept(embedding, own))
        else:
            head = source.linear(
                {self.head: rows}, self.model.hidden_size, outputs={self.head: own}
            )
        return head if group is None else GatheredLinear(head, group, rows)

    def _classes(self, source: BlockWeights) -> Tensor | None:
        labels = self.model.num_labels
        return source.tensor("score.weight", (labels, self.model.hidden_size)) if labels else None


@dataclass(frozen=True, slots=True, eq=False)
class DecoderEnds:
    """The weights before and after the layers. The first stage has no norm, the last stage has only
    the norm.

    Attributes:
        embedding: [vocabulary, hidden].
        head: hidden -> vocabulary. None: the model does not generate.
        classes: [labels, hidden]. None: the model has no labels.
    """

    embedding: Tensor | None
    head: Linear | None
    classes: Tensor | None
    norm: RmsNorm | None


class Decoder(Model):
    """A decoder of blocks, or the layers of one pipeline stage.

    Attributes:
        drained: the drafter's name while the memory of the weights is released. Otherwise "".
        receiving: receives image embeddings from the rank that encodes images. None: there is no
            such rank.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        ends: DecoderEnds,
        layers: tuple[Layer, ...],
        target: LoadTarget,
        *,
        products: Sequence[Product] = (),
        drafter: DraftLayer | None = None,
    ) -> None:
        super().__init__(spec.model, target)
        stage = target.share.stage
        self.ends = ends
        self.layers = layers
        self.stack = stack_of(layers)
        self._one_by_one = LayerByLayer(layers)
        self.products = tuple(products)
        own = target.share.layers(len(spec.layers))
        self._numbers = own  # numbers of the layers
        self._num_layers = len(spec.layers)  # in all stages
        self.elsewhere = tuple(
            f"{spec.prefix}layers.{number}."
            for number in range(len(spec.layers))
            if number not in own
        )
        self._run_layers = layers
        self._stage = stage
        self.receiving: ReceivingTower | None = None
        self._draft_layer = drafter  # set only if it is the decoder's own
        if drafter is not None:
            self.drafter = self.drafting(drafter)
        self._sends_embeddings = stage is not None and stage.is_first and spec.drafter is not None
        self.drained = ""
        self._embedding_scale = _rounded(spec.embedding_scale, self.dtype)
        self._logit_soft_cap = spec.logit_soft_cap

    @property
    def parts(self) -> Sequence[object]:
        """The parts, in the order of `DecoderSpec.parts`."""
        first = self.ends.embedding, self.ends.head, self.ends.classes
        return (*first, *self.layers, self.ends.norm, self._draft_layer)

    def drafting(self, layer: DraftLayer) -> DraftHead:
        """Return a draft head that runs this layer after the decoder."""
        return DraftHead(layer, self.embedded, self.logits)

    def record_experts(self, num_tokens: int) -> None:
        """Record the experts of each token in all forwards from now on.

        Args:
            num_tokens: tokens of the largest forward.
        Raises:
            ConfigError: the layers have no experts.
        """
        blocks = {
            number: layer.ffn
            for number, layer in enumerate(self._run_layers)
            if isinstance(layer.ffn, ExpertsBlock)
        }
        if not blocks:
            whose = "the model has" if self._stage is None else "the layers of one stage have"
            raise ConfigError(f"engine.routed_experts.enabled: {whose} no experts")
        k = max(block.routing.k for block in blocks.values())
        self.routed = routed = RoutedExperts(num_tokens, self._num_layers, k, self.device)
        layers = list(self._run_layers)
        for number, block in blocks.items():
            recorded = RecordedExperts(block.experts, self._numbers[number], routed)
            layers[number] = replace(layers[number], ffn=replace(block, experts=recorded))
        self._run(layers)

    def compute_in_one_way(self) -> None:
        layers = [
            replace(layer, mixer=layer.mixer.in_one_way())
            if isinstance(layer.mixer, LatentAttentionBlock)
            else layer
            for layer in self._run_layers
        ]
        if layers != [*self._run_layers]:
            self._run(layers)

    def _run(self, layers: Sequence[Layer]) -> None:
        """Use other layers with the same weights."""
        self._run_layers = tuple(layers)
        self.stack = self._one_by_one = LayerByLayer(self._run_layers)

    def forward(
        self,
        batch: ForwardBatch,
        pool: KVPool,
        future_tokens: Tensor,
        adapted: AdaptedLinear | None = None,
        late: LateStates | None = None,
    ) -> Tensor:
        stage, drafter, norm = self._stage, self.drafter, self.ends.norm
        features: Sequence[ImageFeatures] = ()
        if stage is not None and not stage.is_first:
            x, embeddings = self._received(stage, batch)
        else:
            x, features = self._inputs(batch, future_tokens)
            kept = drafter is not None or self._sends_embeddings
            embeddings = x.clone() if kept else x  # the layers overwrite x
        taps = () if drafter is None else drafter.taps
        step = ModelStep(batch, adapted, late, features, taps)
        x, residual = self._stack_for(step).forward(x, None, step, pool, None)
        if norm is None:
            assert stage is not None
            hidden = x if residual is None else x + residual
            held = (hidden, embeddings) if self._sends_embeddings else (hidden,)
            stage.hold(held, self._experts_of(batch.sampled))
            return x.new_empty(len(batch.sampled), self.spec.hidden_size)
        if drafter is None:
            x, _ = norm.forward(x, residual, rows=batch.sampled)
        else:
            x, _ = norm.forward(x, residual)
            drafter.follow(step, ModelVectors(x, embeddings), future_tokens, pool)
            x = x.index_select(0, batch.sampled)
        if stage is not None:
            stage.send_back(x, self._experts_of(batch.sampled))
        return x

    def begin(
        self,
        batch: ForwardBatch,
        pool: KVPool,
        future_tokens: Tensor,
        adapted: AdaptedLinear | None = None,
    ) -> "SplitForward":
        """Begin the same forward for prompts, with layers in groups (split prefill). Requires a
        single stage and no drafter."""
        x, features = self._inputs(batch, future_tokens)
        norm, step = self.ends.norm, ModelStep(batch, adapted, features=features)
        assert norm is not None
        return SplitForward(self._stack_for(step), norm, step, pool, x)

    def take_part(self) -> None:
        """Take part in the experts' computation in a step in which this node has no tokens."""
        x = torch.empty(0, self.spec.hidden_size, dtype=self.dtype, device=self.device)
        for layer in self.layers:
            layer.ffn.take_part(x)

    def _experts_of(self, tokens: Tensor) -> Tensor | None:
        """Return the experts of some tokens of the newest forward, as stages exchange them."""
        return None if self.routed is None else self.routed.of(tokens).int()

    def _stack_for(self, step: ModelStep) -> Stack:
        one_by_one = step.adapted is not None or step.taps
        return self._one_by_one if one_by_one else self.stack

    def _received(self, stage: Stage, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Return the hidden states from the first stage and, for a drafter, the embeddings of their
        tokens."""
        shape = batch.positions.shape[-1], self.spec.hidden_size
        x = stage.receive(torch.empty(shape, dtype=self.dtype, device=self.device))
        return x, x if self.drafter is None else stage.receive(torch.empty_like(x))

    def _inputs(
        self, batch: ForwardBatch, future_tokens: Tensor
    ) -> tuple[Tensor, Sequence[ImageFeatures]]:
        """Return the embeddings of a step's tokens, [num_tokens, hidden], and the features of
        images. Includes input embeddings and images."""
        x = self.embedded(batch.token_ids, future_tokens)
        seen: list[VisibleImage] = []
        for part in batch.seen:
            if isinstance(part, VisibleImage):
                seen.append(part)
            else:
                x[part.place : part.place + len(part.values)].copy_(part.values)
        if not seen:
            return x, ()
        images = self.receiving if self.seeing is None else self.seeing
        assert images is not None
        return x, images.embed(seen, x)

    def embedded(self, token_ids: Tensor, future_tokens: Tensor) -> Tensor:
        """Return embeddings [num_tokens, hidden], owned by the caller."""
        assert self.ends.embedding is not None
        x = embed(token_ids, future_tokens, self.ends.embedding)
        if self._embedding_scale != 1.0:
            x *= self._embedding_scale
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [n, vocabulary] in the model's dtype, or in float32 if they are
        soft-capped."""
        assert self.ends.head is not None
        logits = self.ends.head.apply(hidden)
        cap = self._logit_soft_cap
        return logits if cap is None else soft_cap(logits, cap)

    def labels(self, hidden: Tensor) -> Tensor:
        assert self.ends.classes is not None
        return linear(hidden, self.ends.classes)


class SplitForward:
    """A forward of prompts between two groups of its layers (split prefill). Forward stream only.

    It keeps two activations between the groups, [num_tokens, hidden] each.

    Args:
        x: embeddings.
    """

    def __init__(
        self, stack: Stack, norm: RmsNorm, step: ModelStep, pool: KVPool, x: Tensor
    ) -> None:
        self._stack = stack
        self._norm = norm
        self._step = step
        self._pool = pool
        self._held: tuple[Tensor, Tensor | None] = x, None
        self._next = 0

    def advance(self, past: int) -> None:
        """Compute the next layers, up to number `past` - 1."""
        x, residual = self._held
        group = self._next, past
        self._held = self._stack.forward(x, residual, self._step, self._pool, group)
        self._next = past

    def complete(self) -> Tensor:
        """Return the result of `Decoder.forward`. All layers must be computed."""
        return self._norm.forward(*self._held, rows=self._step.batch.sampled)[0]


def _rounded(number: float, dtype: torch.dtype) -> float:
    return torch.tensor(number, dtype=dtype).item()
