"""Draft layers: decoder layers that continue after the target model's layers.

The inputs of a layer are the target model's hidden state of one token, and the next token. They are
joined, and then pass the body: a mixer and a feed-forward net, as in a model's layers. The output
replaces the target model's hidden state of the next token. An EAGLE-3 layer reads the inputs of
three of the target model's layers instead, and has its own head, for a part of the vocabulary.

Sources: DeepSeek-V3, 2024, section 2.2 (MTP). EAGLE, Li et al. 2024, section 3. EAGLE-3, Li et al.
2025, section 3.1.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kv_cache.states import DraftState
from engine.models.blocks.attention import Attention, AttentionBlock
from engine.models.blocks.latent import LatentAttention, LatentAttentionBlock
from engine.models.blocks.layer import (
    Ffn,
    FfnSpec,
    KeptStates,
    LayerSite,
    ModelStep,
    Norm,
    RmsNorm,
    normed,
    summed,
)
from engine.models.drafting.protocol import DraftLayer
from engine.models.linear import Linear
from engine.ranks import Group
from kernels.sampling.bitmask import FORBIDDEN


@dataclass(frozen=True, slots=True)
class BodySpec:
    """The body of a draft layer, with the numbers of its configuration.

    Attributes:
        prefix: prefix of the names of its tensors, relative to the layer's prefix.
    """

    mixer: Attention | LatentAttention
    ffn: FfnSpec
    norm: Norm
    prefix: str

    def keeps(self, hidden_size: int) -> DraftState:
        """Return the state that the whole layer stores."""
        return DraftState((self.mixer.keeps,), hidden_size)

    def built_norm(self, site: LayerSite, name: str) -> RmsNorm:
        """Build a norm of the body or of the layer around it. All are of one kind."""
        return self.norm.build(site.source, name, site.hidden_size)

    def build(self, site: LayerSite) -> "Body":
        """Build the body.

        Args:
            site: context inside the body's prefix.
        """
        return Body(
            mixer=self.mixer.build(site),
            ffn_norm=self.built_norm(site, "post_attention_layernorm"),
            ffn=self.ffn.build(site),
            group=site.source.share.group,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    mixer: AttentionBlock | LatentAttentionBlock
    ffn_norm: RmsNorm
    ffn: Ffn
    group: Group | None = None  # see Layer

    def keep(self, joined: Tensor, step: ModelStep, kept: KeptStates) -> None:
        """Store KV, see DraftLayer.

        Args:
            joined: input of the mixer.
        """
        # The first token of a prompt has no token before it, so its input is zeros. No other token
        # has position 0 on all axes.
        first = (step.batch.positions == 0).view(-1, len(joined)).all(0)[:, None]
        self.mixer.keep(joined.masked_fill(first, 0), step, kept)

    def forward(self, joined: Tensor, past: Tensor, step: ModelStep, kept: KeptStates) -> Tensor:
        """Run the body.

        Args:
            past: vectors that bypass the mixer, [num_tokens, hidden].
        """
        mixed = summed(self.mixer.forward(joined, step, kept), self.group)
        normed, residual = self.ffn_norm.forward(mixed, past)
        return residual + summed(self.ffn.forward(normed, step), self.group)


@dataclass(frozen=True, slots=True)
class InnerNorms:
    """Names of the layer's own norms. None: there is no such norm.

    Attributes:
        token: norm of the token's embedding, before the two inputs are joined.
        vector: norm of the hidden state, before the two inputs are joined.
        head: norm of the layer's output, before the model's head.
        recurring: whether the next draft step uses the output after the head's norm instead of
            before it.
    """

    token: str | None = None
    vector: str | None = None
    head: str | None = None
    recurring: bool = False


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """A draft layer, with the numbers of its configuration.

    Attributes:
        prefix: prefix of the names of its tensors.
        join: module that joins the two input vectors.
        input_norm: whether the body begins with a norm.
    """

    body: BodySpec
    prefix: str
    join: str
    join_bias: bool
    inner_norms: InnerNorms
    input_norm: bool

    def keeps(self, hidden_size: int) -> DraftState:
        return self.body.keeps(hidden_size)

    def build(self, site: LayerSite) -> "DraftBlock":
        hidden, here, inner = site.hidden_size, site.within(self.prefix), self.inner_norms
        within = here.within(self.body.prefix)

        def norm(at: LayerSite, name: str | None) -> RmsNorm | None:
            return None if name is None else self.body.built_norm(at, name)

        last = norm(here, inner.head)
        block = DraftBlock(
            token_norm=norm(here, inner.token),
            vector_norm=norm(here, inner.vector),
            join=here.source.linear({self.join: hidden}, 2 * hidden, bias=self.join_bias),
            body_norm=norm(within, "input_layernorm" if self.input_norm else None),
            body=self.body.build(within),
            norm=last if inner.recurring else None,
            head_norm=None if inner.recurring else last,
        )
        site.source.tidy()
        return block


@dataclass(frozen=True, slots=True, eq=False)
class DraftBlock(DraftLayer):
    """A draft layer that continues from the target model's last layer.

    Attributes:
        head_norm: norm applied only before the model's head.
    """

    token_norm: RmsNorm | None
    vector_norm: RmsNorm | None
    join: Linear  # token, vector -> hidden
    body_norm: RmsNorm | None
    body: Body
    norm: RmsNorm | None
    head_norm: RmsNorm | None

    def keep(self, vectors: Tensor, embeddings: Tensor, step: ModelStep, kept: KeptStates) -> None:
        x = self._joined(vectors, embeddings, step)
        self.body.keep(normed(x, self.body_norm), step, kept)

    def forward(
        self, vectors: Tensor, embeddings: Tensor, step: ModelStep, kept: KeptStates
    ) -> Tensor:
        x = self._joined(vectors, embeddings, step)
        made = self.body.forward(normed(x, self.body_norm), x, step, kept)
        return normed(made, self.norm)

    def logits(self, vectors: Tensor, logits: Callable[[Tensor], Tensor]) -> Tensor:
        return logits(normed(vectors, self.head_norm))

    def _joined(self, vectors: Tensor, embeddings: Tensor, step: ModelStep) -> Tensor:
        parts = normed(embeddings, self.token_norm), normed(vectors, self.vector_norm)
        return step.product(self.join, torch.cat(parts, dim=1))


@dataclass(frozen=True, slots=True)
class Eagle3Spec:
    """An EAGLE-3 layer, with the numbers of its configuration.

    Attributes:
        body: its mixer has two concatenated vectors as input.
        taps: see DraftLayer.
        vocabulary: vocabulary size of the target model.
        known: number of tokens in the layer's own head. Unless `mapped`, they are the first tokens
            of the vocabulary.
        normed_residual: whether the vector bypasses attention after its norm instead of before it.
    """

    body: BodySpec
    taps: tuple[int, ...]
    vocabulary: int
    known: int
    mapped: bool
    normed_residual: bool
    prefix: str = ""

    def keeps(self, hidden_size: int) -> DraftState:
        return self.body.keeps(hidden_size)

    def build(self, site: LayerSite) -> "Eagle3Layer":
        hidden, source = site.hidden_size, site.source
        within, norm = site.within(self.body.prefix), self.body.built_norm
        tokens = None
        if self.mapped:
            shifts = source.integers("d2t", (self.known,))
            tokens = torch.arange(self.known, device=shifts.device).add_(shifts)
        built = Eagle3Layer(
            spec=self,
            join=source.linear({"fc": hidden}, len(self.taps) * hidden),
            token_norm=norm(within, "input_layernorm"),
            vector_norm=norm(within, "hidden_norm"),
            body=self.body.build(within),
            norm=norm(site, "norm"),
            head=source.linear({"lm_head": self.known}, hidden),
            tokens=tokens,
        )
        source.tidy()
        return built


@dataclass(frozen=True, slots=True, eq=False)
class Eagle3Layer(DraftLayer):
    spec: Eagle3Spec
    join: Linear  # tapped vectors -> hidden
    token_norm: RmsNorm
    vector_norm: RmsNorm
    body: Body
    norm: RmsNorm
    head: Linear  # hidden -> known
    tokens: Tensor | None  # int64 [known], ids of these tokens in the model's vocabulary

    @property
    def taps(self) -> tuple[int, ...]:
        return self.spec.taps

    def vectors(self, hidden: Tensor, step: ModelStep) -> Tensor:
        return self.join.apply(torch.cat([step.tapped[number] for number in self.taps], dim=1))

    def keep(self, vectors: Tensor, embeddings: Tensor, step: ModelStep, kept: KeptStates) -> None:
        x, _ = self._joined(vectors, embeddings)
        self.body.keep(x, step, kept)

    def forward(
        self, vectors: Tensor, embeddings: Tensor, step: ModelStep, kept: KeptStates
    ) -> Tensor:
        x, past = self._joined(vectors, embeddings)
        return self.body.forward(x, past, step, kept)

    def logits(self, vectors: Tensor, logits: Callable[[Tensor], Tensor]) -> Tensor:
        known = self.head.apply(self.norm.forward(vectors)[0])
        if self.tokens is None:
            return known
        every = torch.full(
            (len(known), self.spec.vocabulary), FORBIDDEN, dtype=torch.float32, device=known.device
        )
        return every.index_copy_(1, self.tokens, known.float())

    def _joined(self, vectors: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of attention, and the vector that bypasses it."""
        tokens, _ = self.token_norm.forward(embeddings)
        normed, _ = self.vector_norm.forward(vectors)
        past = normed if self.spec.normed_residual else vectors
        return torch.cat((tokens, normed), dim=1), past
