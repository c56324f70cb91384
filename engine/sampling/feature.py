"""Protocols of row features, which change the logits of single rows of a step.

A feature keeps the state of requests in its own columns, by slot. It sees only logits of the model.
It is not called for a step in which none of its requests takes part.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.batch.batch import Ints
from engine.batch.request import Request


class FeatureState(IntEnum):
    """The part of a request that a feature takes."""

    NONE = 0
    ALIKE = 1  # takes part, independently of the tokens before
    TAKES = 2
    WAITS = 3  # and needs all tokens before: its rows are sampled after the previous step


class FeatureInput(Protocol):
    """One feature's work in one step.

    `sent` are its `tensors`, in the same order, on the device.
    """

    def tensors(self) -> Sequence[Tensor]:
        """Return tensors in host memory, contiguous. They are part of the step's single copy to the
        device."""
        ...

    def before(self, sent: Sequence[Tensor], logits: Tensor) -> None:
        """Run before sampling, on the forward stream.

        Args:
            logits: float32 [samples of the step, vocabulary], changed in place.
        """
        ...

    def after(self, sent: Sequence[Tensor], tokens: Tensor) -> Mapping[str, Tensor]:
        """Run after sampling, on the forward stream. The results are copied to the host with the
        tokens.

        Args:
            tokens: int32 [samples of the step], as `sample` gives them.
        """
        ...


class SamplingFeature(Protocol):
    """A row feature. Engine thread only."""

    def acquire(self, slot: int, request: Request) -> FeatureState:
        """Assign a slot to the request. State of the slot's previous request becomes invalid."""
        ...

    def build(
        self, rows: NDArray[np.intp], slots: NDArray[np.intp], positions: Ints
    ) -> FeatureInput:
        """Return the work of a step, without views of memory that may change later.

        Called at the launch of a step, or for rows that wait, after the previous step has ended.

        Args:
            rows: places of the samples that need the feature among those of the step. Not empty. A
                row with drafts has several, and has drafts only if all its features are ALIKE for
                it.
            slots: slots of these samples.
            positions: absolute index of the token that each will be. An upper bound where the
                feature is ALIKE for the row.
        """
        ...

    def rehearsal(self, num_rows: int) -> FeatureInput:
        """Return work on dummy rows for warm-up, for all rows of a step. It has no lasting
        effect."""
        ...
