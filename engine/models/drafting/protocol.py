"""Protocol between a draft head and its layer."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from engine.kv_cache.states import DraftState
from engine.models.blocks.protocol import KeptStates, LayerSite, ModelStep


class DraftLayer(Protocol):
    """A layer that drafts tokens. Vectors, and embeddings of the tokens after them, are
    [num_tokens, hidden].

    Attributes:
        taps: layers of the model whose inputs it reads.
    """

    @property
    def taps(self) -> tuple[int, ...]: ...

    def vectors(self, hidden: Tensor, tapped: Sequence[Tensor], step: ModelStep) -> Tensor:
        """Return the input vectors of a step's tokens, [num_tokens, hidden].

        Args:
            hidden: [num_tokens, hidden], the input of the model's head.
            tapped: [num_tokens, hidden] for each tap.
        """
        ...

    def keep(self, vectors: Tensor, embeddings: Tensor, step: ModelStep, kept: KeptStates) -> None:
        """Write the tokens' KV, and compute nothing else."""
        ...

    def forward(
        self, vectors: Tensor, embeddings: Tensor, step: ModelStep, kept: KeptStates
    ) -> Tensor:
        """Write the tokens' KV, and return their output vectors, [num_tokens, hidden]. None of the
        tokens is the first of a text."""
        ...

    def logits(self, vectors: Tensor, logits: Callable[[Tensor], Tensor]) -> Tensor:
        """Return logits of the following tokens: [n, any] by the model's token ids, finite, owned
        by the caller.

        Args:
            logits: the model's head, which the layer may use.
        """
        ...


class DraftLayerSpec(Protocol):
    """A draft layer before it is built.

    Attributes:
        prefix: of the names of its tensors.
    """

    @property
    def prefix(self) -> str: ...

    def keeps(self, hidden_size: int) -> DraftState: ...

    def build(self, site: LayerSite) -> DraftLayer: ...
