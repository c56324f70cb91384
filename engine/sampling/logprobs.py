"""Log-probabilities of sampled tokens and of the likeliest others, from the model's own logits,
before other features change them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch.batch import Ints
from engine.batch.request import Request
from engine.sampling.feature import FeatureState
from kernels.sampling.logprobs import logprobs


@dataclass(slots=True, eq=False)
class _Work:
    """The rows with logprobs in one step.

    Attributes:
        kept: the rows' logits, from `before` to `after`.
    """

    rows: Tensor  # int64 [m], places among the step's samples
    num_top: int
    kept: Tensor = field(default_factory=lambda: torch.empty(0))

    def tensors(self) -> Sequence[Tensor]:
        return (self.rows,)

    def before(self, sent: Sequence[Tensor], logits: Tensor) -> None:
        (rows,) = sent
        self.kept = logits[rows]

    def after(self, sent: Sequence[Tensor], tokens: Tensor) -> Mapping[str, Tensor]:
        (rows,) = sent
        chosen, top_tokens, top = logprobs(self.kept, tokens[rows], self.num_top)
        return {"rows": self.rows, "chosen": chosen, "top_tokens": top_tokens, "top": top}


class SampledLogprobs:
    """Logprobs by slot. Engine thread only. Comes before every feature that changes logits."""

    def __init__(self, num_slots: int) -> None:
        self._num_top = np.zeros(num_slots, np.int32)

    def acquire(self, slot: int, request: Request) -> FeatureState:
        num_top = request.sampling.logprobs
        self._num_top[slot] = num_top
        return FeatureState.NONE if num_top < 0 else FeatureState.ALIKE

    def build(self, rows: NDArray[np.intp], slots: NDArray[np.intp], positions: Ints) -> _Work:
        return _Work(torch.from_numpy(rows.astype(np.int64)), int(self._num_top[slots].max()))

    def rehearsal(self, num_rows: int) -> _Work:
        return _Work(torch.arange(num_rows), 1)
