"""Limit on the reasoning tokens of a response.

The count derives from the tokens that the CPU knows. So a request that migrates, was retracted or
is replayed needs only its tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch.batch import Ints
from engine.batch.request import Request
from engine.batch.table import SlotTable
from engine.grammar.reasoning import ReasoningStage, ReasoningTracker
from engine.sampling.feature import FeatureState
from kernels.sampling.bitmask import FORBIDDEN


@dataclass(frozen=True, slots=True, eq=False)
class ForcedToken:
    """A Work in which rows[i] of the step samples tokens[i], regardless of other features."""

    rows: Tensor  # int64 [m]
    tokens: Tensor  # int64 [m]

    def tensors(self) -> Sequence[Tensor]:
        return (self.rows, self.tokens)

    def before(self, sent: Sequence[Tensor], logits: Tensor) -> None:
        rows, tokens = sent
        logits.index_fill_(0, rows, FORBIDDEN)
        logits.index_put_((rows, tokens), logits.new_zeros(()))

    def after(self, sent: Sequence[Tensor], tokens: Tensor) -> Mapping[str, Tensor]:
        return {}


class ThinkingBudget:
    """Ends reasoning that has reached its budget. Engine thread only. Comes last."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._readers: dict[int, ReasoningTracker] = {}  # by slot
        self._followed = np.zeros(table.num_slots, np.int64)  # tokens, including the prompt
        self._budgets = np.zeros(table.num_slots, np.int64)
        self._closes = np.zeros(table.num_slots, np.int64)

    def acquire(self, slot: int, request: Request) -> FeatureState:
        self._readers.pop(slot, None)
        sampling = request.sampling
        if sampling.thinking_budget < 0 or sampling.thought is None:
            return FeatureState.NONE
        self._readers[slot] = ReasoningTracker(sampling.thought)
        self._followed[slot] = request.num_prompt
        self._budgets[slot] = sampling.thinking_budget
        self._closes[slot] = sampling.thought.close
        return FeatureState.WAITS

    def build(
        self, rows: NDArray[np.intp], slots: NDArray[np.intp], positions: Ints
    ) -> ForcedToken:
        spent = np.array([self._is_spent(slot) for slot in slots.tolist()])
        closes = torch.from_numpy(self._closes[slots[spent]])
        return ForcedToken(torch.from_numpy(rows[spent].astype(np.int64)), closes)

    def rehearsal(self, num_rows: int) -> ForcedToken:
        return ForcedToken(torch.arange(num_rows), torch.zeros(num_rows, dtype=torch.int64))

    def _is_spent(self, slot: int) -> bool:
        reader = self._readers[slot]
        start, end = int(self._followed[slot]), int(self._table.known[slot])
        reader.read(self._table.tokens[slot, start:end].tolist())
        self._followed[slot] = end
        return reader.stage is ReasoningStage.INSIDE and reader.num_tokens >= self._budgets[slot]
