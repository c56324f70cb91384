"""Token counts for requests with penalties, kept on the device by slot.

With overlap the CPU lags one token behind, so only the device can count the newest token. Each row
of counts is either rebuilt from the table or continued. If the CPU knows every token of a row, its
counts are rebuilt. Otherwise the missing token was sampled in this slot by the previous step, which
counted it. So the rule needs no memory of a slot's previous request.

All rows are allocated at start, because later the KV pages use all memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch.batch import Ints
from engine.batch.image_tokens import in_vocabulary
from engine.batch.request import Request
from engine.batch.table import SlotTable
from engine.sampling.feature import FeatureState
from kernels.sampling.penalties import apply_penalties, count_tokens


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The penalised rows of one step.

    Attributes:
        rows: int64 [m], places among the step's rows.
        slots: int64 [m], their slots, which are also their rows of counts.
        renewed: int64, the slots whose counts are rebuilt.
        prompt_slots, prompt_tokens, output_slots, output_tokens: int64 [n], every token of these
            slots with its slot.
    """

    rows: Tensor
    slots: Tensor
    repetition: Tensor  # float32 [m]
    frequency: Tensor
    presence: Tensor
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
    """

    counts: Tensor
    rows: _Rows

    def tensors(self) -> Sequence[Tensor]:
        return [getattr(self.rows, name) for name in _TENSORS]

    def before(self, sent: Sequence[Tensor], logits: Tensor) -> None:
        """Update the counts, then penalise the logits."""
        rows = _Rows(*sent)
        if len(rows.renewed):
            self.counts.index_fill_(0, rows.renewed, 0)
            count_tokens(self.counts, rows.prompt_slots, rows.prompt_tokens, prompt=True)
            count_tokens(self.counts, rows.output_slots, rows.output_tokens, prompt=False)
        apply_penalties(
            logits,
            rows.rows,
            self.counts,
            rows.slots,
            repetition=rows.repetition,
            frequency=rows.frequency,
            presence=rows.presence,
        )

    def after(self, sent: Sequence[Tensor], tokens: Tensor) -> Mapping[str, Tensor]:
        """Count the new tokens."""
        rows = _Rows(*sent)
        count_tokens(self.counts, rows.slots, tokens[rows.rows], prompt=False)
        return {}


class Penalties:
    """Penalty strengths by slot (engine thread), and counts (forward stream).

    Memory: int32 [num_slots, vocabulary], not initialised, because a row is rebuilt for its first
    request.
    """

    def __init__(self, table: SlotTable, vocabulary_size: int, device: torch.device) -> None:
        self._table = table
        self._repetition = np.ones(table.num_slots, np.float32)
        self._frequency = np.zeros(table.num_slots, np.float32)
        self._presence = np.zeros(table.num_slots, np.float32)
        self._counts = torch.empty(
            table.num_slots, vocabulary_size, dtype=torch.int32, device=device
        )

    def acquire(self, slot: int, request: Request) -> FeatureState:
        sampling = request.sampling
        self._repetition[slot] = sampling.repetition_penalty
        self._frequency[slot] = sampling.frequency_penalty
        self._presence[slot] = sampling.presence_penalty
        return FeatureState.TAKES if sampling.penalised else FeatureState.NONE

    def build(self, rows: NDArray[np.intp], slots: NDArray[np.intp], positions: Ints) -> _Work:
        anew = self._table.known[slots] >= positions
        renewed, lengths = slots[anew], positions[anew]
        num_prompt = np.minimum(self._table.num_prompt[renewed], lengths)
        prompt_slots, prompt_tokens = self._tokens(renewed, np.zeros_like(lengths), num_prompt)
        output_slots, output_tokens = self._tokens(renewed, num_prompt, lengths)
        penalised = _Rows(
            rows=torch.from_numpy(rows),
            slots=torch.from_numpy(slots.astype(np.int64)),
            repetition=torch.from_numpy(self._repetition[slots]),
            frequency=torch.from_numpy(self._frequency[slots]),
            presence=torch.from_numpy(self._presence[slots]),
            renewed=torch.from_numpy(renewed.astype(np.int64)),
            prompt_slots=prompt_slots,
            prompt_tokens=prompt_tokens,
            output_slots=output_slots,
            output_tokens=output_tokens,
        )
        return _Work(self._counts, penalised)

    def rehearsal(self, num_rows: int) -> _Work:
        """Return work that rebuilds the counts of all rows, as for their first requests."""
        rows, ones = torch.arange(num_rows), torch.ones(num_rows)
        zeros = torch.zeros(num_rows, dtype=torch.int64)
        nobody = _Rows(
            rows=rows,
            slots=rows,
            repetition=ones,
            frequency=ones,
            presence=ones,
            renewed=rows,
            prompt_slots=rows,
            prompt_tokens=zeros,
            output_slots=rows,
            output_tokens=zeros,
        )
        return _Work(self._counts, nobody)

    def _tokens(self, slots: NDArray[np.intp], starts: Ints, ends: Ints) -> tuple[Tensor, Tensor]:
        """Return the tokens of indices [starts, ends) of the slots: each token's slot, and the
        tokens."""
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
