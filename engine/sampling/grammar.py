"""Guided decoding: responses that follow a grammar, with one bit per allowed next token.

A `Match` follows the tokens that the CPU knows, read from the table. So a request that migrates,
was retracted or is replayed needs only its tokens. Sampling waits for the previous step, but
forwards do not. If a response begins with reasoning, the grammar applies to the text after it, and
the response cannot end before.

A row whose mask is late is held (`SlotTable.held`): it joins no forward until the mask is ready.
The token that the current step samples for it is dropped (`SlotTable.unchosen`).
"""

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch.batch import Ints
from engine.batch.request import Request
from engine.batch.table import SlotTable
from engine.grammar.bits import words_of
from engine.grammar.matching import Match
from engine.sampling.allowed import TokenBitmask
from engine.sampling.feature import FeatureState


class GrammarMatcher:
    """The grammars by slot. Engine thread only."""

    def __init__(self, table: SlotTable, vocabulary_size: int) -> None:
        self._table = table
        self._words = words_of(vocabulary_size)
        self._matches: dict[int, Match] = {}  # by slot

    def acquire(self, slot: int, request: Request) -> FeatureState:
        self._matches.pop(slot, None)
        if request.match is None:
            return FeatureState.NONE
        self._matches[slot] = request.match
        self._table.held[slot] = request.match.compiled.slow
        return FeatureState.WAITS

    def build(
        self, rows: NDArray[np.intp], slots: NDArray[np.intp], positions: Ints
    ) -> TokenBitmask:
        matches = [self._matches[slot] for slot in slots.tolist()]
        for slot, match in zip(slots.tolist(), matches, strict=True):
            if not match.busy:
                match.ask(self._table.unfollowed(slot, match.num_followed))
        asked = [each for each in matches if not (each.busy or each.ready or each.compiled.slow)]
        if asked:
            asked[0].threads.drive([each for each in asked if not each.fault])
        bits = np.full((len(rows), self._words), -1, np.int32)
        for row, (slot, match) in enumerate(zip(slots.tolist(), matches, strict=True)):
            if match.ready:
                bits[row] = match.mask
            else:
                self._table.unchosen[slot] = True
            if match.compiled.slow or not match.ready:
                self._table.held[slot] = True
        return TokenBitmask(torch.from_numpy(rows.astype(np.int64)), torch.from_numpy(bits))

    def rehearsal(self, num_rows: int) -> TokenBitmask:
        bits = torch.full((num_rows, self._words), -1, dtype=torch.int32)
        return TokenBitmask(torch.arange(num_rows), bits)
