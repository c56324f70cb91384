"""Protocols of row features, which change the logits of single rows of a step.

A feature keeps the state of requests in its own columns, by slot. It sees only logits of the model.
It is not called for a step in which none of its requests takes part.
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
    """The part of a request that a feature takes."""

    NONE = 0
    ALIKE = 1  # takes part, independently of the tokens before
    TAKES = 2  # of a step with drafts, its rows are sampled after the previous step
    WAITS = 3  # and needs all tokens before: its rows are always sampled after the previous step


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """The samples of a step that need one feature, at least one. Columns, one entry each.

    A row with drafts has several. Each is chosen as if the drafts before it were accepted. The
    table stores these drafts after the tokens of the row that are known, so the tokens before a
    sample are the first `positions` ones of its slot.

    Attributes:
        rows: places among the step's samples.
        positions: absolute index of the token that each will be. An upper bound if `build` is
            called at the launch of a step after one with drafts.
        drafts: number of drafts before each.
    """

    rows: NDArray[np.intp]
    slots: NDArray[np.intp]
    positions: Ints
    drafts: Ints

    def at(self, places: NDArray[np.intp]) -> "Samples":
        """Return the samples at these places, which become their `rows`."""
        return Samples(places, self.slots[places], self.positions[places], self.drafts[places])

    def by_slot(self) -> Iterator[tuple[int, NDArray[np.intp]]]:
        """Yield each slot with the places of its samples in these columns, in the order of the
        tokens."""
        order = np.lexsort((self.drafts, self.slots))
        slots, firsts = np.unique(self.slots[order], return_index=True)
        yield from zip(slots.tolist(), np.split(order, firsts[1:]), strict=True)


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

    def build(self, samples: Samples) -> FeatureInput:
        """Return the work of a step, without views of memory that may change later.

        Called at the launch of a step, or for rows that wait, after the previous step has ended.
        All rows with drafts wait if the feature is not ALIKE for one of them.
        """
        ...

    def rehearsal(self, num_rows: int) -> FeatureInput:
        """Return work on dummy rows for warm-up, for all rows of a step. It has no lasting
        effect."""
        ...
