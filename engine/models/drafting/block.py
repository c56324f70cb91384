"""A decoder layer that continues after a model's last layer.

Its inputs are the model's hidden state of one token, and the next token. Its output replaces the
model's hidden state of that next token.

Sources: DeepSeek-V3, 2024, section 2.2 (MTP). EAGLE, Li et al. 2024, section 3.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kv_cache.states import DraftState
from engine.models.blocks.norm import RmsNorm
from engine.models.blocks.protocol import KeptStates, LayerSite, ModelStep
from engine.models.drafting.body import Body, BodySpec
from engine.models.linear import Linear


@dataclass(frozen=True, slots=True)
class InnerNorms:
    """Names of the layer's own norms. None: there is no such norm.

    Attributes:
        token: norm of the token's embedding, before the two are joined.
        vector: norm of the hidden state before it, before the two are joined.
        head: norm of the layer's output, before the model's head.
        recurring: the next draft step takes the output after the head's norm instead of before it.
    """

    token: str | None = None
    vector: str | None = None
    head: str | None = None
    recurring: bool = False


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """A draft layer with the numbers that its configuration gives.

    Attributes:
        prefix: of the names of its tensors.
        join: the module that makes one vector of two.
        join_bias: the join has a bias.
        input_norm: the body begins with a norm.
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
class DraftBlock:
    """A draft layer, see DraftLayer.

    Attributes:
        norm: of its output vectors.
        head_norm: applied before the model's head only.
    """

    token_norm: RmsNorm | None
    vector_norm: RmsNorm | None
    join: Linear  # token, vector -> hidden
    body_norm: RmsNorm | None
    body: Body
    norm: RmsNorm | None
    head_norm: RmsNorm | None

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    def vectors(self, hidden: Tensor, tapped: Sequence[Tensor], step: ModelStep) -> Tensor:
        return hidden

    def keep(self, vectors: Tensor, embeddings: Tensor, step: ModelStep, kept: KeptStates) -> None:
        x = self._joined(vectors, embeddings, step)
        self.body.keep(_normed(x, self.body_norm), step, kept)

    def forward(
        self, vectors: Tensor, embeddings: Tensor, step: ModelStep, kept: KeptStates
    ) -> Tensor:
        x = self._joined(vectors, embeddings, step)
        made = self.body.forward(_normed(x, self.body_norm), x, step, kept)
        return _normed(made, self.norm)

    def logits(self, vectors: Tensor, logits: Callable[[Tensor], Tensor]) -> Tensor:
        return logits(_normed(vectors, self.head_norm))

    def _joined(self, vectors: Tensor, embeddings: Tensor, step: ModelStep) -> Tensor:
        parts = _normed(embeddings, self.token_norm), _normed(vectors, self.vector_norm)
        return step.product(self.join, torch.cat(parts, dim=1))


def _normed(x: Tensor, norm: RmsNorm | None) -> Tensor:
    return x if norm is None else norm.forward(x)[0]
