"""Features that add to or scale logits: logit bias, bad words, minimum length, penalties.

A forbidden token gets such a low value that it is never sampled. A bad word forbids its last token
after its other tokens.

Penalties need the counts of a request's tokens, which are kept on the device by slot. With overlap,
the CPU is one token behind, so only the device can count the newest token. A step counts the token
that it samples, unless the row has drafts. Then a later step counts the accepted tokens, when the
CPU knows them. Drafts are counted while the samples after them are penalised, and then removed. The
memory of all counts is allocated at start, because KV pages later use all memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch.batch import Ints
from engine.batch.image_tokens import in_vocabulary
from engine.batch.request import Request
from engine.batch.table import SlotTable
from engine.sampling.feature import FeatureInput, FeatureState, Samples
from kernels.sampling.bitmask import FORBIDDEN
from kernels.sampling.penalties import apply_penalties, count_tokens

Tokens = NDArray[np.int64]
Values = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class LogitAdditions(FeatureInput):
    """Additions to logits, one entry per logit. Several entries for one logit add up."""

    rows: Tensor  # int64, places among the step's samples
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


def forbidding(tokens: Sequence[int]) -> tuple[Tokens, Values]:
    """Return the addition that prevents the sampling of these tokens."""
    return np.array(tokens, np.int64), np.full(len(tokens), FORBIDDEN, np.float32)


_Edits = tuple[Tokens, Values]
_MILDER = 16  # ending too early is better than a token that the grammar forbids


class LogitBias:
    """Logit biases by slot. Engine thread only."""

    parameters = frozenset({"logit_bias", "min_tokens"})

    def __init__(self, num_slots: int, eos_token_ids: Sequence[int]) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._short: dict[int, _Edits] = {}  # by slot, while the response is too short to end
        self._long: dict[int, _Edits] = {}  # by slot, once the response is long enough
        # Minimum length in tokens, including the prompt.
        self._least = np.zeros(num_slots, np.int32)

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

    def build(self, samples: Samples) -> LogitAdditions:
        short = samples.positions < self._least[samples.slots]
        edits = [
            (self._short if is_short else self._long)[slot]
            for slot, is_short in zip(samples.slots.tolist(), short.tolist(), strict=True)
        ]
        return LogitAdditions.of(samples.rows, edits)

    def rehearsal(self, num_rows: int) -> LogitAdditions:
        return LogitAdditions.nothing(num_rows)


class BadWordsFilter:
    """Bad words by slot. They apply to the response, not to the prompt. Engine thread only.

    A word of one token is always forbidden. The last token of a longer word is forbidden after its
    other tokens, so these must be known.
    """

    parameters = frozenset({"bad_word_ids"})

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._words: dict[int, tuple[tuple[int, ...], ...]] = {}  # by slot

    def acquire(self, slot: int, request: Request) -> FeatureState:
        self._words[slot] = words = request.sampling.bad_word_ids
        if not words:
            return FeatureState.NONE
        return FeatureState.WAITS if max(map(len, words)) > 1 else FeatureState.ALIKE

    def build(self, samples: Samples) -> LogitAdditions:
        before = zip(samples.slots.tolist(), samples.positions.tolist(), strict=True)
        edits = [forbidding(self._forbidden(slot, position)) for slot, position in before]
        return LogitAdditions.of(samples.rows, edits)

    def rehearsal(self, num_rows: int) -> LogitAdditions:
        return LogitAdditions.nothing(num_rows)

    def _forbidden(self, slot: int, position: int) -> list[int]:
        table, words = self._table, self._words[slot]
        longest = max(map(len, words)) - 1
        start = max(int(table.num_prompt[slot]), position - longest)
        before = tuple(table.tokens[slot, start:position].tolist())
        return sorted(
            {word[-1] for word in words if len(word) == 1 or before[1 - len(word) :] == word[:-1]}
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The samples with penalties of one step. Samples with fewer drafts before them come first.

    Attributes:
        rows: int64 [m], places among the step's samples.
        slots: int64 [m], their slots, which are also their rows of counts.
        drafts: int64 [n], the draft before each of the last n samples. All samples after a draft
            are last.
        counted, counted_slots: int64, places of the samples whose tokens are counted, and their
            slots.
        renewed: int64, the slots whose counts are rebuilt.
        prompt_slots, prompt_tokens, output_slots, output_tokens: int64 [n], tokens to count, with
            their slots.
    """

    rows: Tensor
    slots: Tensor
    repetition: Tensor  # float32 [m]
    frequency: Tensor
    presence: Tensor
    drafts: Tensor
    counted: Tensor
    counted_slots: Tensor
    renewed: Tensor
    prompt_slots: Tensor
    prompt_tokens: Tensor
    output_slots: Tensor
    output_tokens: Tensor


_TENSORS = tuple(f.name for f in fields(_Rows))


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """Penalties of one step.

    Attributes:
        counts: int32 [num_slots, vocabulary], on the device.
        sizes: number of samples with no draft before them, with one draft, and so on.
    """

    counts: Tensor
    rows: _Rows
    sizes: tuple[int, ...]

    def tensors(self) -> Sequence[Tensor]:
        return [getattr(self.rows, name) for name in _TENSORS]

    def before(self, sent: Sequence[Tensor], logits: Tensor) -> None:
        """Update the counts, then penalise the logits."""
        rows, counts = _Rows(*sent), self.counts
        if len(rows.renewed):
            counts.index_fill_(0, rows.renewed, 0)
            count_tokens(counts, rows.prompt_slots, rows.prompt_tokens, prompt=True)
        if len(rows.output_tokens):
            count_tokens(counts, rows.output_slots, rows.output_tokens, prompt=False)
        first, past_draft = 0, len(rows.rows) - len(rows.drafts)
        for size in self.sizes:
            some, first = slice(first, first + size), first + size
            if some.start:
                drafts = rows.drafts[some.start - past_draft : some.stop - past_draft]
                count_tokens(counts, rows.slots[some], drafts, prompt=False)
            apply_penalties(
                logits,
                rows.rows[some],
                counts,
                rows.slots[some],
                repetition=rows.repetition[some],
                frequency=rows.frequency[some],
                presence=rows.presence[some],
            )
        if len(rows.drafts):
            count_tokens(counts, rows.slots[past_draft:], rows.drafts, prompt=False, times=-1)

    def after(self, sent: Sequence[Tensor], tokens: Tensor) -> Mapping[str, Tensor]:
        """Count the new tokens of rows without drafts."""
        rows = _Rows(*sent)
        count_tokens(self.counts, rows.counted_slots, tokens[rows.counted], prompt=False)
        return {}


class Penalties:
    """Penalty strengths by slot (engine thread), and token counts (forward stream).

    Memory: int32 [num_slots, vocabulary], not initialised, because a row is rebuilt for each new
    request.
    """

    parameters = frozenset({"repetition_penalty", "frequency_penalty", "presence_penalty"})

    def __init__(self, table: SlotTable, vocabulary_size: int, device: torch.device) -> None:
        self._table = table
        self._repetition = np.ones(table.num_slots, np.float32)
        self._frequency = np.zeros(table.num_slots, np.float32)
        self._presence = np.zeros(table.num_slots, np.float32)
        self._counted = np.zeros(table.num_slots, np.int32)  # tokens counted by launched steps
        self._counts = torch.empty(
            table.num_slots, vocabulary_size, dtype=torch.int32, device=device
        )

    def acquire(self, slot: int, request: Request) -> FeatureState:
        sampling = request.sampling
        self._repetition[slot] = sampling.repetition_penalty
        self._frequency[slot] = sampling.frequency_penalty
        self._presence[slot] = sampling.presence_penalty
        self._counted[slot] = 0
        return FeatureState.TAKES if sampling.penalised else FeatureState.NONE

    def build(self, samples: Samples) -> _Work:
        order = np.argsort(samples.drafts, kind="stable")
        rows, slots, drafts = samples.rows[order], samples.slots[order], samples.drafts[order]
        sizes = np.bincount(drafts)
        num_rows = int(sizes[0])
        firsts, places, ends = (
            slots[:num_rows],
            rows[:num_rows],
            samples.positions[order[:num_rows]],
        )
        drafted = slots[num_rows:]
        alone = ~np.isin(firsts, drafted)
        renewed, added = self._uncounted(firsts, ends, alone)
        before = self._table.tokens[drafted, samples.positions[order[num_rows:]] - 1]
        penalised = _Rows(
            rows=torch.from_numpy(rows.astype(np.int64)),
            slots=torch.from_numpy(slots.astype(np.int64)),
            repetition=torch.from_numpy(self._repetition[slots]),
            frequency=torch.from_numpy(self._frequency[slots]),
            presence=torch.from_numpy(self._presence[slots]),
            drafts=torch.from_numpy(before.astype(np.int64)),
            counted=torch.from_numpy(places[alone].astype(np.int64)),
            counted_slots=torch.from_numpy(firsts[alone].astype(np.int64)),
            renewed=torch.from_numpy(renewed.astype(np.int64)),
            **added,
        )
        return _Work(self._counts, penalised, tuple(sizes.tolist()))

    def rehearsal(self, num_rows: int) -> _Work:
        """Return work that rebuilds the counts of all rows, with a draft in half of them."""
        num_drafts = num_rows // 2
        rows, ones = torch.arange(num_rows), torch.ones(num_rows)
        zeros = torch.zeros(num_rows, dtype=torch.int64)
        rehearsed = _Rows(
            rows=rows,
            slots=rows,
            repetition=ones,
            frequency=ones,
            presence=ones,
            drafts=zeros[:num_drafts],
            counted=rows,
            counted_slots=rows,
            renewed=rows,
            prompt_slots=rows,
            prompt_tokens=zeros,
            output_slots=rows,
            output_tokens=zeros,
        )
        return _Work(self._counts, rehearsed, (num_rows - num_drafts, num_drafts))

    def _uncounted(
        self, slots: NDArray[np.intp], ends: Ints, alone: NDArray[np.bool_]
    ) -> tuple[NDArray[np.intp], dict[str, Tensor]]:
        """Return the slots whose counts are rebuilt, and the columns of tokens that this step
        counts before it samples. Tokens unknown to the CPU were counted when they were sampled.
        `alone`: rows without drafts, which count their sample themselves."""
        starts, known = self._counted[slots], self._table.known[slots] >= ends
        self._counted[slots] = ends + alone
        slots, starts, ends = slots[known], starts[known], ends[known]
        is_new = (starts == 0) | (starts > ends)
        starts = np.where(is_new, 0, starts)
        num_prompt = np.where(is_new, np.minimum(self._table.num_prompt[slots], ends), starts)
        prompt_slots, prompt_tokens = self._tokens(slots, starts, num_prompt)
        output_slots, output_tokens = self._tokens(slots, num_prompt, ends)
        return slots[is_new], {
            "prompt_slots": prompt_slots,
            "prompt_tokens": prompt_tokens,
            "output_slots": output_slots,
            "output_tokens": output_tokens,
        }

    def _tokens(self, slots: NDArray[np.intp], starts: Ints, ends: Ints) -> tuple[Tensor, Tensor]:
        """Return the slots and the tokens at indices [starts, ends) of the slots, without those of
        images."""
        counts = ends - starts
        total = int(counts.sum())
        offsets = np.cumsum(counts) - counts
        indices = np.arange(total) - np.repeat(offsets - starts, counts)
        owners = np.repeat(slots, counts)
        tokens = self._table.tokens[owners, indices].astype(np.int64)
        sayable = in_vocabulary(tokens)
        if not sayable.all():
            owners, tokens = owners[sayable], tokens[sayable]
        return torch.from_numpy(owners.astype(np.int64)), torch.from_numpy(tokens)
