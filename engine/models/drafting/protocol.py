"""What a head for drafts needs of its layer."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from engine.kv_cache.states import DraftState
from engine.models.blocks.protocol import Kept, Site, Step


class DraftLayer(Protocol):
    """Vectors, and embeddings of the tokens behind them, are [num_tokens, hidden].

    taps: layers of the model whose inputs it wants to see.
    """

    @property
    def taps(self) -> tuple[int, ...]: ...

    def vectors(self, hidden: Tensor, tapped: Sequence[Tensor], step: Step) -> Tensor:
        """Of a step's tokens, [num_tokens, hidden].

        Args:
            hidden: [num_tokens, hidden], as the model's head has them.
            tapped: of each tap, likewise.
        """
        ...

    def keep(self, vectors: Tensor, embeddings: Tensor, step: Step, kept: Kept) -> None:
        """Writes what later tokens will need of these, and computes nothing else."""
        ...

    def forward(self, vectors: Tensor, embeddings: Tensor, step: Step, kept: Kept) -> Tensor:
        """Writes them, too; returns the vectors of those tokens, [num_tokens, hidden]. None of them
        is a text's first."""
        ...

    def logits(self, vectors: Tensor, logits: Callable[[Tensor], Tensor]) -> Tensor:
        """Of the tokens behind, by the model's numbers of them: [n, any], finite, the caller's own.

        Args:
            logits: of the model's head, which the layer may use.
        """
        ...


class DraftLayerSpec(Protocol):
    """prefix: of the names of its tensors."""

    @property
    def prefix(self) -> str: ...

    def keeps(self, hidden_size: int) -> DraftState: ...

    def build(self, site: Site) -> DraftLayer: ...
