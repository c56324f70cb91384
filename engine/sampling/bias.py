"""Logit bias, and the tokens that must not end a response before its minimum length. Both are
constant for a request."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.batch.batch import Ints
from engine.batch.request import Request
from engine.sampling.additions import LogitAdditions, Tokens, Values, forbidding
from engine.sampling.feature import FeatureState

_Edits = tuple[Tokens, Values]

_MILDER = 16  # ending too early is better than a token that the grammar forbids


class LogitBias:
    """The biases by slot. Engine thread only."""

    def __init__(self, num_slots: int, eos_token_ids: Sequence[int]) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._short: dict[int, _Edits] = {}  # by slot, while the response is too short to end
        self._long: dict[int, _Edits] = {}  # afterwards
        self._least = np.zeros(num_slots, np.int32)  # minimum length, with the prompt

    def acquire(self, slot: int, request: Request) -> FeatureState:
        sampling = request.sampling
        if not sampling.logit_bias and not sampling.min_tokens:
            return FeatureState.NONE
        biases = sampling.logit_bias
        tokens = np.array([token for token, _ in biases], np.int64)
        values = np.array([bias for _, bias in biases], np.float32)
        enders = (*sampling.stop_token_ids, *(self._eos_token_ids if sampling.ends_at_eos else ()))
        banned, lowest = forbidding(sorted(set(enders)))
        lowest /= _MILDER
        self._long[slot] = tokens, values
        self._short[slot] = np.concatenate((tokens, banned)), np.concatenate((values, lowest))
        self._least[slot] = request.num_prompt + sampling.min_tokens
        return FeatureState.TAKES if sampling.min_tokens else FeatureState.ALIKE

    def build(
        self, rows: NDArray[np.intp], slots: NDArray[np.intp], positions: Ints
    ) -> LogitAdditions:
        short = positions < self._least[slots]
        edits = [
            (self._short if is_short else self._long)[slot]
            for slot, is_short in zip(slots.tolist(), short.tolist(), strict=True)
        ]
        return LogitAdditions.of(rows, edits)

    def rehearsal(self, num_rows: int) -> LogitAdditions:
        return LogitAdditions.nothing(num_rows)
