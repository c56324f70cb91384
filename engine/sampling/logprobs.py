"""Logprobs of sampled tokens and prompt tokens, before other features change the logits.

Sampled tokens have alternatives: the most likely tokens. Prompt logprobs are computed in slices of
a chunk's tokens. They need logits of tokens after which no row samples, so they request additional
hidden states of a step. A prompt with this option is computed completely, even if it is cached.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.batch.batch import ScheduleBatch
from engine.batch.request import Request
from engine.batch.table import SlotTable
from engine.sampling.feature import FeatureState, Samples
from engine.sampling.heads import PROMPT_SLICE, HiddenStates
from kernels.sampling.logprobs import logprobs

# Columns with the places, on the device, of samples with a hidden state or with routed experts.
HIDDEN_OF = "hidden_of"
EXPERTS_OF = "experts_of"


@dataclass(slots=True, eq=False)
class _Work:
    """The rows with logprobs in one step.

    Attributes:
        hidden, experts: whether a row needs its hidden state or its experts.
            `SamplingInputs.sample` adds them.
        kept: logits of the rows, from `before` to `after`.
    """

    rows: Tensor  # int64 [m], places among the step's samples
    num_top: int
    hidden: bool = False
    experts: bool = False
    kept: Tensor = field(default_factory=lambda: torch.empty(0))

    def tensors(self) -> Sequence[Tensor]:
        return (self.rows,)

    def before(self, sent: Sequence[Tensor], logits: Tensor) -> None:
        (rows,) = sent
        self.kept = logits[rows]

    def after(self, sent: Sequence[Tensor], tokens: Tensor) -> Mapping[str, Tensor]:
        (rows,) = sent
        chosen, top_tokens, top = logprobs(self.kept, tokens[rows], self.num_top)
        columns = {"rows": self.rows, "chosen": chosen, "top_tokens": top_tokens, "top": top}
        added = {HIDDEN_OF: self.hidden, EXPERTS_OF: self.experts}
        return columns | {name: rows for name, wanted in added.items() if wanted}


class SampledLogprobs:
    """Logprobs of sampled tokens by slot. Engine thread only. Comes before all features that change
    logits."""

    parameters = frozenset({"logprobs"})

    def __init__(self, num_slots: int) -> None:
        self._num_top = np.zeros(num_slots, np.int32)
        self._hidden = np.zeros(num_slots, np.bool_)
        self._experts = np.zeros(num_slots, np.bool_)

    def acquire(self, slot: int, request: Request) -> FeatureState:
        num_top = request.sampling.logprobs
        self._num_top[slot] = num_top
        self._hidden[slot] = request.sampling.hidden_states
        self._experts[slot] = request.sampling.routed_experts
        return FeatureState.NONE if num_top < 0 else FeatureState.ALIKE

    def build(self, samples: Samples) -> _Work:
        num_top = int(self._num_top[samples.slots].max())
        return _Work(
            torch.from_numpy(samples.rows.astype(np.int64)),
            num_top,
            bool(self._hidden[samples.slots].any()),
            bool(self._experts[samples.slots].any()),
        )

    def rehearsal(self, num_rows: int) -> _Work:
        return _Work(torch.arange(num_rows), 1)


@dataclass(frozen=True, slots=True, eq=False)
class PromptWork:
    """The prompt logprobs of one step.

    Attributes:
        places: int64 [n], tokens of the step after which the probability of the next prompt token
            is needed.
        rows: int64 [n], rows of these tokens.
        targets: int32 [n], the next prompt tokens.
        hidden, experts: whether a row needs the hidden states or the experts of these tokens.
    """

    places: Tensor
    rows: Tensor
    targets: Tensor
    num_top: int
    hidden: bool = False
    experts: bool = False

    def run(
        self, logits: Iterator[Tensor], targets: Tensor, states: HiddenStates
    ) -> Mapping[str, Tensor]:
        """Compute the logprobs. On the forward stream.

        Args:
            logits: logits of the tokens at `places`, PROMPT_SLICE at a time.
            targets: on the device.
            states: states of the step, including the tokens at `places`.
        """
        parts = [
            logprobs(next(logits).float(), wanted, self.num_top)
            for wanted in torch.split(targets, PROMPT_SLICE)
        ]
        chosen, top_tokens, top = (torch.cat(column) for column in zip(*parts, strict=True))
        columns = {"rows": self.rows, "chosen": chosen, "top_tokens": top_tokens, "top": top}
        if self.hidden:
            columns["hidden"] = states.of_prompts
        if self.experts:
            columns["experts"] = states.experts_of_prompts()
        return columns


class PromptLogprobs:
    """Requests with prompt logprobs, by slot. Engine thread only."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._num_top = np.full(table.num_slots, -1, np.int32)
        self._first = np.ones(table.num_slots, np.int32)  # index of the first token with a logprob
        self._hidden = np.zeros(table.num_slots, np.bool_)
        self._experts = np.zeros(table.num_slots, np.bool_)

    def acquire(self, slot: int, request: Request) -> bool:
        """Assign a slot to the request. Return whether it needs prompt logprobs."""
        self._first[slot] = request.sampling.first_prompt_logprob
        self._num_top[slot] = request.sampling.prompt_logprobs
        self._hidden[slot] = request.sampling.hidden_states
        self._experts[slot] = request.sampling.routed_experts
        return request.sampling.prompt_logprobs >= 0

    def build(self, batch: ScheduleBatch) -> PromptWork | None:
        """Return the work of a step, or None if no computed token is followed by another prompt
        token."""
        table, slots = self._table, batch.slots.astype(np.intp)
        last = np.minimum(batch.ends, table.num_prompt[slots] - 1)
        begins = np.maximum(batch.starts, self._first[slots] - 1)
        counts = np.where(self._num_top[slots] < 0, 0, np.maximum(last - begins, 0))
        if not counts.any():
            return None
        rows = np.repeat(np.arange(len(slots)), counts)
        offsets = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        offsets += (begins - batch.starts)[rows]
        lengths = batch.ends - batch.starts
        firsts = np.cumsum(lengths) - lengths
        targets = table.tokens[slots[rows], batch.starts[rows] + offsets + 1]
        return PromptWork(
            torch.from_numpy((firsts[rows] + offsets).astype(np.int64)),
            torch.from_numpy(rows.astype(np.int64)),
            torch.from_numpy(targets),
            int(self._num_top[slots[counts > 0]].max()),
            bool(self._hidden[slots[counts > 0]].any()),
            bool(self._experts[slots[counts > 0]].any()),
        )

    def rehearsal(self, num_tokens: int) -> PromptWork:
        """Return work on the first tokens of a step, at most one slice, for warmup."""
        places = torch.arange(min(num_tokens, PROMPT_SLICE))
        return PromptWork(places, places, places.int(), 1)
