"""Protocols of row features, which change the logits of single rows of a step.

A feature keeps the state of requests in its own columns, by slot. Its only input from the model is
logits. It is called only for steps with a request that uses it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.batch.batch import Ints
from engine.batch.request import Request


class FeatureState(IntEnum):
    """The effect of a feature on a request, and when it can be applied."""

    NONE = 0
    ALIKE = 1  # active, independent of the request's earlier tokens
    TAKES = 2  # active. In steps with drafts, its rows are sampled after the previous step
    # active, and needs all earlier tokens: its rows are always sampled after the previous step.
    WAITS = 3


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """The samples of a step that use one feature, at least one. Columns with one entry per sample.

    A row with drafts has several samples. Each is chosen as if the drafts before it were accepted.
    The table stores these drafts after the row's known tokens, so that the tokens before a sample
    are the first `positions` tokens of its slot.

    Attributes:
        rows: places among the step's samples.
        positions: index of the sampled token in its request. An upper bound if `build` is called
            when a step is launched after a step with drafts.
        drafts: number of drafts before each sample.
    """

    rows: NDArray[np.intp]
    slots: NDArray[np.intp]
    positions: Ints
    drafts: Ints

    def at(self, places: NDArray[np.intp]) -> "Samples":
        """Return the samples at these places. The places become their `rows`."""
        return Samples(places, self.slots[places], self.positions[places], self.drafts[places])

    def by_slot(self) -> Iterator[tuple[int, NDArray[np.intp]]]:
        """Yield each slot with the places of its samples in these columns, in token order."""
        order = np.lexsort((self.drafts, self.slots))
        slots, firsts = np.unique(self.slots[order], return_index=True)
        yield from zip(slots.tolist(), np.split(order, firsts[1:]), strict=True)


class FeatureInput(Protocol):
    """The work of one feature in one step.

    `sent` are its `tensors`, in the same order, on the device.
    """

    def tensors(self) -> Sequence[Tensor]:
        """Return contiguous tensors in host memory. They are part of the step's single copy to the
        device."""
        ...

    def before(self, sent: Sequence[Tensor], logits: Tensor) -> None:
        """Run before sampling, on the forward stream.

        Args:
            logits: float32 [samples of the step, vocabulary], modified in place.
        """
        ...

    def after(self, sent: Sequence[Tensor], tokens: Tensor) -> Mapping[str, Tensor]:
        """Run after sampling, on the forward stream. The results are copied to the host with the
        tokens.

        Args:
            tokens: int32 [samples of the step], as `sample` returns them.
        """
        return {}


class SamplingFeature(Protocol):
    """A row feature. Engine thread only."""

    @property
    def parameters(self) -> frozenset[str]:
        """Sampling parameters that request the feature."""
        ...

    def acquire(self, slot: int, request: Request) -> FeatureState:
        """Assign a slot to the request. State of the slot's previous request becomes invalid.

        Called only if the request has one of `parameters`, or the previous request used the
        feature.
        """
        ...

    def build(self, samples: Samples) -> FeatureInput:
        """Return the work of a step, without views of memory that may change later.

        Called when a step is launched or, for rows that wait, after the previous step has ended. If
        the feature is not ALIKE for a row with drafts, all rows with drafts wait.
        """
        ...

    def rehearsal(self, num_rows: int) -> FeatureInput:
        """Return work on dummy rows for warmup, for all rows of a step. It has no lasting
        effect."""
        ...
