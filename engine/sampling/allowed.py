"""Requests with a fixed set of allowed tokens, kept as one bit per token and slot."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch.batch import Ints
from engine.batch.request import Request
from engine.grammar.bits import WORD, words_of
from engine.sampling.feature import FeatureState
from kernels.sampling.bitmask import apply_bitmask


@dataclass(frozen=True, slots=True, eq=False)
class TokenBitmask:
    """A Work in which rows[i] of the step may sample the tokens of bitmask[i], as `apply_bitmask`
    reads it."""

    rows: Tensor  # int64 [m]
    bitmask: Tensor  # int32 [m, words]

    def tensors(self) -> Sequence[Tensor]:
        return (self.rows, self.bitmask)

    def before(self, sent: Sequence[Tensor], logits: Tensor) -> None:
        rows, bitmask = sent
        apply_bitmask(logits, rows, bitmask)

    def after(self, sent: Sequence[Tensor], tokens: Tensor) -> Mapping[str, Tensor]:
        return {}


class AllowedTokens:
    """The allowed tokens by slot. Engine thread only. Memory: int32 [num_slots, vocabulary / 32],
    allocated on first use."""

    def __init__(self, num_slots: int, vocabulary_size: int) -> None:
        self._bits = np.zeros((num_slots, words_of(vocabulary_size)), np.uint32)

    def acquire(self, slot: int, request: Request) -> FeatureState:
        allowed = request.sampling.allowed_token_ids
        if not allowed:
            return FeatureState.NONE
        tokens = np.array(allowed, np.int64)
        self._bits[slot] = 0
        bits = np.uint32(1) << (tokens % WORD).astype(np.uint32)
        np.bitwise_or.at(self._bits[slot], tokens // WORD, bits)
        return FeatureState.ALIKE

    def build(
        self, rows: NDArray[np.intp], slots: NDArray[np.intp], positions: Ints
    ) -> TokenBitmask:
        bits = self._bits[slots].view(np.int32)
        return TokenBitmask(torch.from_numpy(rows.astype(np.int64)), torch.from_numpy(bits))

    def rehearsal(self, num_rows: int) -> TokenBitmask:
        words = self._bits.shape[1]
        return TokenBitmask(torch.arange(num_rows), torch.full((num_rows, words), -1).int())
