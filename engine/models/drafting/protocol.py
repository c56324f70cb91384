"""Protocols between a target model and its drafter, and between a draft head and its layer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from torch import Tensor

from engine.batch.forward import ForwardBatch
from engine.kv_cache.kv import KVPool
from engine.models.blocks.layer import KeptStates, ModelStep

# Draws draft tokens, int32 [n], from logits [n, any] of the first n rows. The second argument is
# the number of the draft. A draft is negative if its logits contain NaN or Inf.
Draw: TypeAlias = Callable[[Tensor, int], Tensor]


class ModelVectors(NamedTuple):
    """The target model's vectors of a step's tokens, [num_tokens, hidden] each.

    Attributes:
        hidden: input of the model's head.
        embeddings: embeddings of tokens and images.
    """

    hidden: Tensor
    embeddings: Tensor


class DeviceDrafter(Protocol):
    """A drafter on the device. Its KV is in the target model's pages. Forward stream only. Never
    waits for the device.

    Attributes:
        taps: layers of the target model whose inputs it reads.
    """

    @property
    def taps(self) -> tuple[int, ...]: ...

    @property
    def parts(self) -> Sequence[object]:
        """Return the objects that hold the weights."""
        ...

    def follow(
        self, step: ModelStep, seen: ModelVectors, future_tokens: Tensor, pool: KVPool
    ) -> None:
        """Store the drafter's KV of a step's tokens, after the target model's forward. In a step
        with drafts, `step.late` receives the update that follows verification."""
        ...

    def before(self, batch: ForwardBatch, pool: KVPool) -> Tensor:
        """Return the vectors before each row's first token, [num_rows, hidden]."""
        ...

    def advance(
        self, one: ForwardBatch, vectors: Tensor, future_tokens: Tensor, pool: KVPool
    ) -> Tensor:
        """Store the KV of one token of each row. Return the rows' output vectors.

        Args:
            one: a decode step. None of its tokens is the first token of a prompt.
            vectors: vectors before these tokens, [num_rows, hidden].
        """
        ...

    def logits(self, vectors: Tensor) -> Tensor:
        """Return the logits of the drafts after the tokens of `advance`, which returned the
        vectors. See DraftLayer."""
        ...


class DraftSteps(Protocol):
    """The forwards of a drafter within a step of the target model.

    Attributes:
        token_ids: token ids of the step, with space for drafts.
    """

    @property
    def token_ids(self) -> Tensor: ...

    def vectors(self, number: int, num_rows: int) -> Tensor:
        """Compute token `number` of each of the first rows, and return the output vectors."""
        ...


class DraftLayer(ABC):
    """A layer that drafts tokens. Vectors, and embeddings of the tokens after them, are
    [num_tokens, hidden]."""

    __slots__ = ()

    @property
    def taps(self) -> tuple[int, ...]:
        """Return the layers of the target model whose inputs it reads."""
        return ()

    def vectors(self, hidden: Tensor, step: ModelStep) -> Tensor:
        """Return the input vectors of a step's tokens, [num_tokens, hidden].

        Args:
            hidden: [num_tokens, hidden], input of the target model's head.
            step: has the inputs of the layers in `taps`.
        """
        return hidden

    @abstractmethod
    def keep(self, vectors: Tensor, embeddings: Tensor, step: ModelStep, kept: KeptStates) -> None:
        """Write the tokens' KV, and compute nothing else."""

    @abstractmethod
    def forward(
        self, vectors: Tensor, embeddings: Tensor, step: ModelStep, kept: KeptStates
    ) -> Tensor:
        """Write the tokens' KV, and return their output vectors, [num_tokens, hidden]. None of the
        tokens is the first token of a prompt."""

    @abstractmethod
    def logits(self, vectors: Tensor, logits: Callable[[Tensor], Tensor]) -> Tensor:
        """Return logits of the next tokens: [n, any] by the model's token ids, finite, owned by the
        caller.

        Args:
            logits: the target model's head, which the layer may use.
        """
