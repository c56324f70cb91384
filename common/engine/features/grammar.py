"""Answers that keep to a grammar: what may come next, as one bit per token.

A matcher follows the tokens that the CPU knows, read from the table: so one that goes on elsewhere,
was retracted or is replayed needs nothing but its tokens. What is sampled waits for the step
before; forwards do not. Where an answer begins with thought, the grammar is of what is behind it;
the answer cannot end before.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from common.engine.features.allowed import Bitmask
from common.engine.features.bits import allow, forbid, words_of
from common.engine.features.seam import Part
from common.engine.features.thought import Stage, ThoughtReader
from common.engine.rows.batch import Ints
from common.engine.rows.request import Request
from common.engine.rows.table import RequestTable


class Grammar:
    """Engine thread only."""

    def __init__(
        self, table: RequestTable, vocabulary_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._table = table
        self._words = words_of(vocabulary_size)
        self._thinking = np.full(self._words, -1, np.int32)  # anything but an end
        for token in eos_token_ids:
            if token < vocabulary_size:  # configurations may name others
                forbid(self._thinking, token)
        self._matchers: dict[int, Any] = {}  # by slot: xgrammar.GrammarMatcher
        self._readers: dict[int, ThoughtReader] = {}  # of the same
        self._opens = np.full(table.num_slots, -1, np.int64)  # the token that begins their thought
        self._followed = np.zeros(table.num_slots, np.int64)  # tokens, with the prompt

    def acquire(self, slot: int, request: Request) -> Part:
        self._matchers.pop(slot, None)
        self._readers.pop(slot, None)
        if request.compiled is None:
            return Part.NONE
        from xgrammar import GrammarMatcher

        thought = request.sampling.thought
        self._matchers[slot] = GrammarMatcher(request.compiled)
        self._readers[slot] = ThoughtReader(thought)
        self._opens[slot] = -1 if thought is None or thought.open is None else thought.open
        self._followed[slot] = request.num_prompt
        return Part.WAITS

    def build(self, rows: NDArray[np.intp], slots: NDArray[np.intp], positions: Ints) -> Bitmask:
        bits = np.full((len(rows), self._words), -1, np.int32)
        for row, slot in enumerate(slots.tolist()):
            matcher = self._matchers[slot]
            match self._follow(slot, matcher):
                case Stage.INSIDE:
                    bits[row] = self._thinking
                case stage if not matcher.is_terminated():
                    matcher.fill_next_token_bitmask(bits, row)
                    if stage is Stage.AHEAD:
                        allow(bits[row], int(self._opens[slot]))
        return Bitmask(torch.from_numpy(rows.astype(np.int64)), torch.from_numpy(bits))

    def rehearsal(self, num_rows: int) -> Bitmask:
        bits = torch.full((num_rows, self._words), -1, dtype=torch.int32)
        return Bitmask(torch.arange(num_rows), bits)

    def _follow(self, slot: int, matcher: Any) -> Stage:
        """Up to the newest token that is known. After its end there is nothing to follow."""
        start, end = int(self._followed[slot]), int(self._table.known[slot])
        reader = self._readers[slot]
        for token in reader.read(self._table.tokens[slot, start:end].tolist()):
            if matcher.is_terminated() or not matcher.accept_token(token):
                break
        self._followed[slot] = end
        return reader.stage
