"""Additions to single logits: a bias, or a value so low that the token is never sampled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.sampling.bitmask import FORBIDDEN

Tokens = NDArray[np.int64]
Values = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class LogitAdditions:
    """A Work with one entry per logit. Several entries for one logit add up."""

    rows: Tensor  # int64, places among the step's rows
    tokens: Tensor  # int64
    values: Tensor  # float32

    @classmethod
    def of(cls, rows: NDArray[np.intp], edits: Sequence[tuple[Tokens, Values]]) -> Self:
        """Return the additions of several rows, each with its tokens and their values."""
        counts = [len(tokens) for tokens, _ in edits]
        return cls(
            torch.from_numpy(np.repeat(rows, counts).astype(np.int64)),
            torch.from_numpy(np.concatenate([tokens for tokens, _ in edits])),
            torch.from_numpy(np.concatenate([values for _, values in edits])),
        )

    @classmethod
    def nothing(cls, num_rows: int) -> Self:
        """Return additions of 0, one for each row."""
        rows = torch.arange(num_rows)
        return cls(rows, torch.zeros(num_rows, dtype=torch.int64), torch.zeros(num_rows))

    def tensors(self) -> Sequence[Tensor]:
        return (self.rows, self.tokens, self.values)

    def before(self, sent: Sequence[Tensor], logits: Tensor) -> None:
        rows, tokens, values = sent
        logits.index_put_((rows, tokens), values, accumulate=True)

    def after(self, sent: Sequence[Tensor], tokens: Tensor) -> Mapping[str, Tensor]:
        return {}


def forbidding(tokens: Sequence[int]) -> tuple[Tokens, Values]:
    """Return the addition that keeps these tokens from being sampled."""
    return np.array(tokens, np.int64), np.full(len(tokens), FORBIDDEN, np.float32)
