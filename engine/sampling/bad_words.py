"""Words that a response never completes. Their last token is forbidden after their other tokens."""

import numpy as np
from numpy.typing import NDArray

from engine.batch.batch import Ints
from engine.batch.request import Request
from engine.batch.table import SlotTable
from engine.sampling.additions import LogitAdditions, forbidding
from engine.sampling.feature import FeatureState


class BadWordsFilter:
    """The bad words by slot. Only the response counts, not the prompt. Engine thread only.

    A word of one token is always forbidden. A longer one requires that the tokens before are known.
    """

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._words: dict[int, tuple[tuple[int, ...], ...]] = {}  # by slot

    def acquire(self, slot: int, request: Request) -> FeatureState:
        self._words[slot] = words = request.sampling.bad_word_ids
        if not words:
            return FeatureState.NONE
        return FeatureState.WAITS if max(map(len, words)) > 1 else FeatureState.ALIKE

    def build(
        self, rows: NDArray[np.intp], slots: NDArray[np.intp], positions: Ints
    ) -> LogitAdditions:
        return LogitAdditions.of(
            rows, [forbidding(self._forbidden(slot)) for slot in slots.tolist()]
        )

    def rehearsal(self, num_rows: int) -> LogitAdditions:
        return LogitAdditions.nothing(num_rows)

    def _forbidden(self, slot: int) -> list[int]:
        table, words = self._table, self._words[slot]
        start, end = int(table.num_prompt[slot]), int(table.known[slot])
        longest = max(map(len, words)) - 1
        before = tuple(table.tokens[slot, max(start, end - longest) : end].tolist())
        return sorted(
            {word[-1] for word in words if len(word) == 1 or before[1 - len(word) :] == word[:-1]}
        )
