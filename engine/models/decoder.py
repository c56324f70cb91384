"""A native decoder: embedding, layers of blocks, head. Knows nothing of what is in a block."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.batch.forward import ForwardBatch
from engine.kv_cache.kv import KVPool
from engine.models.blocks.late_states import LateStates
from engine.models.blocks.layer import Layer, LayerSpec
from engine.models.blocks.norm import Norm, RmsNorm
from engine.models.blocks.protocol import Adapted, Site, Step
from engine.models.blocks.source import Source
from engine.models.drafting import DraftHead, DraftLayer, DraftLayerSpec
from engine.models.linear import Linear, Product
from engine.models.quantized.plain import PLAIN
from engine.models.quantized.protocol import Scheme
from engine.models.spec import ModelSpec
from engine.models.stack import LayerByLayer, stack_of, tap
from engine.models.vision.seeing import Seeing
from kernels.layers.embedding import embed


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder as its configuration says, layer by layer.

    norm: the one before the head.
    stored: how the checkpoint stores matrices, those that it does not store as they are.
    embedding_scale: multiplies embeddings, rounded to the dtype that is computed in.
    logit_soft_cap: logits are cap * tanh(logit / cap); None: as they are.
    prefix: of the names of the decoder's own tensors; checkpoints of decoders without any head have
        none.
    unused: what names of tensors begin with that belong to something else.
    offered: the layer that the checkpoint has for drafts, which is no part of the decoder; drafter:
        that which is.
    """

    model: ModelSpec
    layers: tuple[LayerSpec, ...]
    norm: Norm
    tied_embeddings: bool
    embedding_scale: float = 1.0
    logit_soft_cap: float | None = None
    stored: Scheme = PLAIN
    prefix: str = "model."
    unused: tuple[str, ...] = ()
    offered: DraftLayerSpec | None = field(default=None, repr=False)
    drafter: DraftLayerSpec | None = None

    def drafting(self, drafter: DraftLayerSpec) -> "DecoderSpec":
        """With a drafter that the checkpoint has."""
        draft = drafter.keeps(self.model.hidden_size)
        return replace(self, model=replace(self.model, draft=draft), drafter=drafter)

    def build(self, source: Source) -> "Decoder":
        """The decoder with weights from `source`."""
        *parts, drafter = self.parts(source)
        embedding, head, classes, *layers, norm = parts
        return Decoder(
            spec=self,
            embedding=embedding,
            head=head,
            classes=classes,
            layers=tuple(layers),
            norm=norm,
            products=[each for each in source.products if self._adaptable(each, head)],
            drafter=drafter,
        )

    def parts(self, source: Source) -> Iterator[Any]:
        """Embedding, head, classes, layers, norm, drafter: each is made when it is asked for."""
        rows, hidden = self.model.vocabulary_size, self.model.hidden_size
        site = Site(source, hidden)
        # The largest first: nothing else is there yet while they are there twice.
        embedding = source.tensor(f"{self.prefix}embed_tokens.weight", (rows, hidden))
        yield embedding
        yield self._head(source, embedding)
        del embedding
        yield self._classes(source)
        for number, layer in enumerate(self.layers):
            yield layer.build(site.within(f"{self.prefix}layers.{number}."))
        yield self.norm.build(source, f"{self.prefix}norm", hidden)
        yield None if self.drafter is None else self.drafter.build(site)

    def _adaptable(self, product: Product, head: Linear | None) -> bool:
        drafts = self.drafter is not None and any(
            name.startswith(self.drafter.prefix) for name in product.modules
        )
        return product.linear is not head and not drafts

    def _head(self, source: Source, embedding: Tensor) -> Linear | None:
        if not self.model.generates:
            return None
        if self.tied_embeddings:
            return source.tied(embedding)
        return source.linear({"lm_head": self.model.vocabulary_size}, self.model.hidden_size)

    def _classes(self, source: Source) -> Tensor | None:
        labels = self.model.num_labels
        return source.tensor("score.weight", (labels, self.model.hidden_size)) if labels else None


class Decoder:
    """Weights and the one call that uses them. Stateless: KV is in the pool it is given.

    Args:
        embedding: [vocabulary, hidden].
        head: hidden -> vocabulary; None: it generates nothing.
        classes: [labels, hidden]; None: it has none.
        products: of the layers.

    Attributes:
        drafter: what guesses tokens from its vectors; None: nothing does.
        seeing: makes embeddings of images; None: there are none in a step.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        embedding: Tensor,
        head: Linear | None,
        classes: Tensor | None,
        layers: tuple[Layer, ...],
        norm: RmsNorm,
        products: Sequence[Product] = (),
        drafter: DraftLayer | None = None,
    ) -> None:
        self.spec = spec.model
        self.device = embedding.device
        self.dtype = embedding.dtype
        self.embedding = embedding
        self.head = head
        self.classes = classes
        self.layers = layers
        self.stack = stack_of(layers)
        self.products = tuple(products)
        self._adaptable = LayerByLayer(layers)
        self.norm = norm
        self.seeing: Seeing | None = None
        self._draft_layer = drafter  # if it is its own
        self.drafter = None if drafter is None else self.drafting(drafter)
        self._embedding_scale = _rounded(spec.embedding_scale, self.dtype)
        self._logit_soft_cap = spec.logit_soft_cap

    @property
    def parts(self) -> Sequence[object]:
        """As `DecoderSpec.parts` makes them."""
        own = (self.embedding, self.head, self.classes, *self.layers, self.norm)
        return (*own, self._draft_layer)

    def drafting(self, layer: DraftLayer) -> DraftHead:
        """Such a layer behind this decoder."""
        return DraftHead(layer, self._embedded, self.logits)

    def forward(
        self,
        batch: ForwardBatch,
        pool: KVPool,
        future_tokens: Tensor,
        adapted: Adapted | None = None,
        late: LateStates | None = None,
    ) -> Tensor:
        """Computes a step and writes what its tokens leave into their pages.

        Never waits for the device, and launches the same kernels on the same addresses for
        batches of the same shapes at the same addresses: it can be captured as a graph.

        Args:
            future_tokens: int32 [num_slots], the last token sampled in every slot.
            adapted: None: no row has an adapter.
            late: of a step with drafts: where layers add what is to be done about their states
                once it is known which of these stand.
        Returns:
            Hidden states of batch.sampled, [num_sampled, hidden], for `logits`.
        """
        step = Step(batch, adapted, late)
        x = self._embedded(batch.token_ids, future_tokens)
        if batch.seen:
            assert self.seeing is not None
            self.seeing.embed(batch.seen, x)
        drafter = self.drafter
        tapped: Sequence[Tensor] = ()
        if drafter is not None and drafter.layer.taps:
            x, residual, tapped = tap(self.layers, drafter.layer.taps, x, step, pool)
        else:
            stack = self.stack if adapted is None else self._adaptable
            x, residual = stack.forward(x, step, pool)
        if drafter is None:
            x, _ = self.norm.forward(x, residual, rows=batch.sampled)
            return x
        x, _ = self.norm.forward(x, residual)
        drafter.follow(step, x, tapped, future_tokens, pool)
        return x.index_select(0, batch.sampled)

    def _embedded(self, token_ids: Tensor, future_tokens: Tensor) -> Tensor:
        """[num_tokens, hidden], the caller's own."""
        x = embed(token_ids, future_tokens, self.embedding)
        if self._embedding_scale != 1.0:
            x *= self._embedding_scale
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, vocabulary] in the model's dtype, or in float32 where they are soft-capped."""
        assert self.head is not None
        logits = self.head.apply(hidden)
        cap = self._logit_soft_cap
        return logits if cap is None else logits.float().div_(cap).tanh_().mul_(cap)

    def labels(self, hidden: Tensor) -> Tensor:
        """[n, num_labels] in the model's dtype."""
        assert self.classes is not None
        return F.linear(hidden, self.classes)


def _rounded(number: float, dtype: torch.dtype) -> float:
    return torch.tensor(number, dtype=dtype).item()
