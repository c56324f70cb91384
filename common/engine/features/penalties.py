"""Token counts for requests with penalties, kept on the device by slot.

With overlap the CPU lags one token behind, so that only the device can count the newest. A row of
counts is either made anew from the table or continued, and the rule needs no memory of who had the
slot before: where the CPU knows every token of a row, the counts are made anew; where it does not,
the missing token was sampled in this slot by the step before, which counted it.

All rows there can be are allocated at start: memory that the first penalised requests would ask for
is memory that pages have taken by then.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.rows.batch import Ints
from common.engine.rows.table import RequestTable
from common.engine.rows.upload import upload
from kernels.penalties import apply_penalties, count_tokens


@dataclass(frozen=True, slots=True, eq=False)
class PenaltyBatch:
    """The penalised rows of one step.

    rows: int64 [m], places among the step's rows; slots: int64 [m], theirs, which are their rows
    of counts too.
    renewed: int64, the slots whose counts are made anew: from prompt and output, token by token,
    each with its slot, int64 [n].
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

    def to(self, device: torch.device) -> "PenaltyBatch":
        """The batch on the device, see `upload`."""
        uploaded = upload([getattr(self, name) for name in _TENSORS], device)
        return PenaltyBatch(**dict(zip(_TENSORS, uploaded, strict=True)))


_TENSORS = tuple(f.name for f in fields(PenaltyBatch))


class PenaltyCounts:
    """Which rows are penalised (engine thread), and the counts (forward stream). Memory: int32
    [num_slots, vocabulary], not filled, since a row is made anew for its first owner."""

    def __init__(self, table: RequestTable, vocabulary_size: int, device: torch.device) -> None:
        self._table = table
        self._counts = torch.empty(
            table.num_slots, vocabulary_size, dtype=torch.int32, device=device
        )

    def build(
        self, slots: Ints, positions: Ints, samples: NDArray[np.bool_]
    ) -> PenaltyBatch | None:
        """On the engine thread, at launch; None where no row is penalised.

        Args:
            slots: of the step's rows.
            positions: absolute index of the token that each will sample.
            samples: whether it will; others are not penalised.
        """
        rows = (self._table.penalised[slots] & samples).nonzero()[0]
        if not len(rows):
            return None
        slots, positions = slots[rows], positions[rows]
        anew = self._table.known[slots] >= positions
        renewed, lengths = slots[anew], positions[anew]
        num_prompt = np.minimum(self._table.num_prompt[renewed], lengths)
        prompt_slots, prompt_tokens = self._tokens(renewed, np.zeros_like(lengths), num_prompt)
        output_slots, output_tokens = self._tokens(renewed, num_prompt, lengths)
        return PenaltyBatch(
            rows=torch.from_numpy(rows),
            slots=torch.from_numpy(slots.astype(np.int64)),
            repetition=torch.from_numpy(self._table.repetition_penalty[slots]),
            frequency=torch.from_numpy(self._table.frequency_penalty[slots]),
            presence=torch.from_numpy(self._table.presence_penalty[slots]),
            renewed=torch.from_numpy(renewed.astype(np.int64)),
            prompt_slots=prompt_slots,
            prompt_tokens=prompt_tokens,
            output_slots=output_slots,
            output_tokens=output_tokens,
        )

    def rehearsal(self) -> PenaltyBatch:
        """Of nobody's tokens, in the first slot, whose counts are made anew for its first owner."""
        zero, one = torch.zeros(1, dtype=torch.int64), torch.ones(1)
        return PenaltyBatch(
            rows=zero,
            slots=zero,
            repetition=one,
            frequency=one,
            presence=one,
            renewed=zero,
            prompt_slots=zero,
            prompt_tokens=zero,
            output_slots=zero,
            output_tokens=zero,
        )

    def apply(self, batch: PenaltyBatch, logits: Tensor) -> None:
        """On the forward stream, before sampling: brings counts up to date, penalises logits.

        Args:
            batch: on the device.
            logits: float32 [n, vocabulary].
        """
        if len(batch.renewed):
            self._counts.index_fill_(0, batch.renewed, 0)
            count_tokens(self._counts, batch.prompt_slots, batch.prompt_tokens, prompt=True)
            count_tokens(self._counts, batch.output_slots, batch.output_tokens, prompt=False)
        apply_penalties(
            logits,
            batch.rows,
            self._counts,
            batch.slots,
            repetition=batch.repetition,
            frequency=batch.frequency,
            presence=batch.presence,
        )

    def add(self, batch: PenaltyBatch, tokens: Tensor) -> None:
        """On the forward stream, after sampling: counts the new tokens (of all sampled rows)."""
        count_tokens(self._counts, batch.slots, tokens[batch.rows], prompt=False)

    def _tokens(self, slots: Ints, starts: Ints, ends: Ints) -> tuple[Tensor, Tensor]:
        """Token indices [starts, ends) of the slots: each token's slot, and the tokens."""
        counts = ends - starts
        total = int(counts.sum())
        offsets = np.cumsum(counts) - counts
        indices = np.arange(total) - np.repeat(offsets - starts, counts)
        owners = np.repeat(slots, counts)
        tokens = self._table.tokens[owners, indices].astype(np.int64)
        return torch.from_numpy(owners.astype(np.int64)), torch.from_numpy(tokens)
