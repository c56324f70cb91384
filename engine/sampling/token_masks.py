"""Features that restrict the next token: allowed tokens, guided decoding, reasoning budget.

Allowed tokens and grammars have one bit per token. A `Match` follows the known tokens in the table,
and the reasoning budget counts them. A request that migrates, was retracted or is replayed
therefore needs only its tokens. Sampling waits for the previous step, but forwards do not. If a
response begins with reasoning, the grammar applies to the text after it, and the response cannot
end before.

A row with drafts has a mask for each of its samples. A draft that its mask forbids is never
accepted, so the samples after it need no mask.

A row whose mask is not ready is held (`SlotTable.held`): it is in no forward until the mask is
ready.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.batch.request import Request
from engine.batch.table import SlotTable
from engine.grammar.matching import WORD, Match, ReasoningStage, ReasoningTracker, words_of
from engine.sampling.feature import FeatureInput, FeatureState, Samples
from kernels.sampling.bitmask import FORBIDDEN, apply_bitmask


@dataclass(frozen=True, slots=True, eq=False)
class TokenBitmask(FeatureInput):
    """A mask for some rows: rows[i] of the step may sample the tokens of bitmask[i], see
    `apply_bitmask`."""

    rows: Tensor  # int64 [m]
    bitmask: Tensor  # int32 [m, words]

    def tensors(self) -> Sequence[Tensor]:
        return (self.rows, self.bitmask)

    def before(self, sent: Sequence[Tensor], logits: Tensor) -> None:
        rows, bitmask = sent
        apply_bitmask(logits, rows, bitmask)


class AllowedTokens:
    """Allowed tokens by slot. Engine thread only. Memory: int32 [num_slots, vocabulary / 32],
    allocated on first use."""

    parameters = frozenset({"allowed_token_ids"})

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

    def build(self, samples: Samples) -> TokenBitmask:
        bits = self._bits[samples.slots].view(np.int32)
        return TokenBitmask(torch.from_numpy(samples.rows.astype(np.int64)), torch.from_numpy(bits))

    def rehearsal(self, num_rows: int) -> TokenBitmask:
        words = self._bits.shape[1]
        return TokenBitmask(torch.arange(num_rows), torch.full((num_rows, words), -1).int())


class GrammarMatcher:
    """Grammars by slot (guided decoding). Engine thread only."""

    parameters = frozenset({"guide"})

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

    def build(self, samples: Samples) -> TokenBitmask:
        rows = [(self._matches[slot], slot, places) for slot, places in samples.by_slot()]
        for match, slot, places in rows:
            if not match.busy:
                drafts = self._table.drafts_of(slot, len(places) - 1)
                match.ask(self._table.unfollowed(slot, match.num_followed), drafts)
        matches = [match for match, _, _ in rows]
        asked = [each for each in matches if not (each.busy or each.ready or each.compiled.slow)]
        if asked:
            asked[0].threads.drive([each for each in asked if not each.fault])
        bits = np.full((len(samples.rows), self._words), -1, np.int32)
        for match, slot, places in rows:
            if is_ready := match.ready:
                for place, mask in zip(places.tolist(), match.masks, strict=False):
                    bits[place] = mask
            else:
                self._table.unchosen[slot] = True
            if match.compiled.slow or not is_ready:
                self._table.held[slot] = True
        return TokenBitmask(torch.from_numpy(samples.rows.astype(np.int64)), torch.from_numpy(bits))

    def rehearsal(self, num_rows: int) -> TokenBitmask:
        bits = torch.full((num_rows, self._words), -1, dtype=torch.int32)
        return TokenBitmask(torch.arange(num_rows), bits)


@dataclass(frozen=True, slots=True, eq=False)
class ForcedToken(FeatureInput):
    """Forced tokens: rows[i] of the step samples tokens[i], regardless of other features."""

    rows: Tensor  # int64 [m]
    tokens: Tensor  # int64 [m]

    def tensors(self) -> Sequence[Tensor]:
        return (self.rows, self.tokens)

    def before(self, sent: Sequence[Tensor], logits: Tensor) -> None:
        rows, tokens = sent
        logits.index_fill_(0, rows, FORBIDDEN)
        logits.index_put_((rows, tokens), logits.new_zeros(()))


class ThinkingBudget:
    """Ends reasoning that has reached its budget. Engine thread only. Must be the last feature."""

    parameters = frozenset({"thinking_budget"})

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._readers: dict[int, ReasoningTracker] = {}  # by slot
        # Number of tokens, including the prompt.
        self._followed = np.zeros(table.num_slots, np.int64)
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

    def build(self, samples: Samples) -> ForcedToken:
        spent = np.zeros(len(samples.rows), np.bool_)
        for slot, places in samples.by_slot():
            spent[places] = self._spent(slot, len(places) - 1)
        closes = torch.from_numpy(self._closes[samples.slots[spent]])
        return ForcedToken(torch.from_numpy(samples.rows[spent].astype(np.int64)), closes)

    def rehearsal(self, num_rows: int) -> ForcedToken:
        return ForcedToken(torch.arange(num_rows), torch.zeros(num_rows, dtype=torch.int64))

    def _spent(self, slot: int, num_drafts: int) -> list[bool]:
        """Return whether the budget is used up after the known tokens, and after each draft."""
        reader = self._readers[slot]
        start, end = int(self._followed[slot]), int(self._table.known[slot])
        reader.read(self._table.tokens[slot, start:end].tolist())
        self._followed[slot] = end
        spent, ahead = [self._is_spent(slot, reader)], copy(reader)
        for draft in self._table.drafts_of(slot, num_drafts):
            ahead.read([draft])
            spent.append(self._is_spent(slot, ahead))
        return spent

    def _is_spent(self, slot: int, reader: ReasoningTracker) -> bool:
        return reader.stage is ReasoningStage.INSIDE and reader.num_tokens >= self._budgets[slot]
