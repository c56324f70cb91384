"""What a row feature is: something that single rows of a step ask of their logits.

A feature keeps what it must know of a request in columns of its own, by slot, and sees of a model
nothing but logits. Of a step that none of its requests takes part in it is not asked.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.batch.batch import Ints
from engine.batch.request import Request


class Part(IntEnum):
    """What a feature has to do with a request."""

    NONE = 0
    ALIKE = 1  # takes part, in the same way whatever stands before the token
    TAKES = 2
    WAITS = 3  # and must know every token before: its rows are sampled after the step before ended


class Work(Protocol):
    """One feature's part of one step.

    `sent` are its `tensors`, in their order, on the device.
    """

    def tensors(self) -> Sequence[Tensor]:
        """In host memory, contiguous; they travel in the step's one copy."""
        ...

    def before(self, sent: Sequence[Tensor], logits: Tensor) -> None:
        """On the forward stream, before sampling.

        Args:
            logits: float32 [samples of the step, vocabulary], changed in place.
        """
        ...

    def after(self, sent: Sequence[Tensor], tokens: Tensor) -> Mapping[str, Tensor]:
        """On the forward stream, after sampling; what it returns goes to the host with the tokens.

        Args:
            tokens: int32 [samples of the step], as `sample` gives them.
        """
        ...


class RowFeature(Protocol):
    """Engine thread only."""

    def acquire(self, slot: int, request: Request) -> Part:
        """The request has got that slot; nothing of who had it before is valid any more."""
        ...

    def build(self, rows: NDArray[np.intp], slots: NDArray[np.intp], positions: Ints) -> Work:
        """At the launch of a step, or for rows that wait once the step before has ended; keeps no
        view of what may change later.

        Args:
            rows: places of the samples that want it, among the step's; not empty. A row has several
                where it has drafts, which it only has if all its features are ALIKE to them.
            slots: theirs.
            positions: absolute index of the token that each will be; of one that is ALIKE to it, at
                most.
        """
        ...

    def rehearsal(self, num_rows: int) -> Work:
        """Of so many rows, all of the step's, and nobody's tokens: it leaves no trace."""
        ...
