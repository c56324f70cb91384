"""The EAGLE-3 draft layer, which reads the inputs of three of the target model's layers.

It has its own head, for a part of the target model's vocabulary.

Source: EAGLE-3, Li et al. 2025, section 3.1.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kv_cache.states import DraftState
from engine.models.blocks.layer import KeptStates, LayerSite, ModelStep, RmsNorm
from engine.models.drafting.block import Body, BodySpec
from engine.models.drafting.protocol import DraftLayer
from engine.models.linear import Linear
from kernels.sampling.bitmask import FORBIDDEN


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
