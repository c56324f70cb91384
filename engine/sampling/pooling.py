"""Pooling: prompts without generation, for embeddings, classification and token scores.

The result is the pooled hidden states, or a head's output for the last one. A step may mix such
prompts with others. Each chunk gives a part of the result vector, and all parts are added up. If
only the last token counts, the other parts are zero.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.requests.pooling import PoolingMode
from engine.batch.batch import NOT_FINITE, NOT_SAMPLED, ScheduleBatch
from engine.batch.request import Request
from engine.batch.table import SlotTable
from engine.models.spec import ModelSpec
from engine.sampling.heads import SCORED_SLICE, HiddenStates

SLICE = 1024  # tokens whose float32 states fit in the reserved memory

_Rows: TypeAlias = NDArray[np.intp]
# Parts of results: row numbers, and float32 [rows, any].
Pooled: TypeAlias = Sequence[tuple[_Rows, Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class PoolingWork:
    """The pooling work of one step.

    Attributes:
        only: whether all rows of the step are pooled, so that nothing is sampled.
        places: int64 [n], additional tokens of the step whose hidden states are needed.
        summed: rows whose result is a sum of hidden states.
        sources: int64 [m], places of these states among all states that the forward returns.
        owners: int64 [m], the row of each state, as a place in `summed`.
        labelled: rows whose last state goes through the classification head.
        scored: rows whose last state goes through the model's head, see HeadInputs.
        tokens: int64 [scored, k], padded with 0.
    """

    only: bool
    places: Tensor
    summed: _Rows
    sources: Tensor
    owners: Tensor
    labelled: _Rows
    scored: _Rows
    tokens: Tensor

    def tensors(self) -> list[Tensor]:
        """Return all tensors, contiguous and in host memory."""
        return [self.sources, self.owners, torch.from_numpy(self.labelled), self.tokens]

    def run(self, states: HiddenStates, logits: Iterator[Tensor], sent: Sequence[Tensor]) -> Pooled:
        """Compute the results. On the forward stream.

        Args:
            states: the state of each row's last token first, the states at `places` last.
            logits: logits of the rows `scored`, SCORED_SLICE at a time.
            sent: `tensors()`, on the device.
        """
        hidden = states.hidden
        sources, owners, labelled, tokens = sent[:4]
        parts: list[tuple[_Rows, Tensor]] = []
        if len(self.summed):
            shape = len(self.summed), hidden.shape[1]
            sums = hidden.new_zeros(shape, dtype=torch.float32)
            for some, whose in zip(
                torch.split(sources, SLICE), torch.split(owners, SLICE), strict=True
            ):
                sums.index_add_(0, whose, hidden[some].float())
            parts.append((self.summed, sums))
        if len(self.labelled):
            parts.append((self.labelled, states.model.labels(hidden[labelled]).float()))
        if len(self.scored):
            likely = [
                next(logits).float().log_softmax(dim=-1).gather(1, wanted)
                for wanted in torch.split(tokens, SCORED_SLICE)
            ]
            parts.append((self.scored, torch.cat(likely)))
        return parts


def nothing_sampled(last: Tensor) -> Tensor:
    """Return int32 [n] for rows that sample nothing: codes that show whether their hidden states
    are finite."""
    finite = last.isfinite().all(dim=-1)
    return torch.where(finite, NOT_SAMPLED, NOT_FINITE).int()


class PoolingFeature:
    """Requests with pooling, by slot. Engine thread only."""

    def __init__(self, table: SlotTable) -> None:
        self._num_prompt = table.num_prompt
        self._pool = np.zeros(table.num_slots, np.int8)  # 0: not pooled
        self._tokens: dict[int, tuple[int, ...]] = {}  # by slot, for requests with token scores

    def acquire(self, slot: int, request: Request) -> bool:
        """Assign a slot to the request. Return whether it is pooled."""
        pooling = request.pooling
        self._pool[slot] = 0 if pooling is None else pooling.pool
        self._tokens.pop(slot, None)
        if pooling is not None and pooling.tokens:
            self._tokens[slot] = pooling.tokens
        return pooling is not None

    def build(self, batch: ScheduleBatch, num_others: int) -> PoolingWork:
        """Return the work of a step with at least one pooled row.

        Args:
            num_others: number of additional tokens whose states other work needs. They come before
                the tokens of this work.
        """
        pools = self._pool[batch.slots]
        lengths = batch.ends - batch.starts
        firsts = np.cumsum(lengths) - lengths
        ends_here = batch.ends == self._num_prompt[batch.slots]
        last = np.flatnonzero((pools == PoolingMode.LAST) & ends_here)
        mean = np.flatnonzero(pools == PoolingMode.MEAN)
        first = np.flatnonzero((pools == PoolingMode.FIRST) & (batch.starts == 0))
        spread = np.repeat(mean, lengths[mean])
        offsets = np.arange(len(spread)) - np.repeat(
            np.cumsum(lengths[mean]) - lengths[mean], lengths[mean]
        )
        places = np.concatenate((firsts[spread] + offsets, firsts[first]))
        summed = np.concatenate((last, mean, first))
        owners = np.concatenate((last, spread, first))
        sources = np.concatenate((last, len(pools) + num_others + np.arange(len(places))))
        scored = np.flatnonzero((pools == PoolingMode.TOKENS) & ends_here)
        return PoolingWork(
            only=bool(pools.all()),
            places=torch.from_numpy(places.astype(np.int64)),
            summed=summed,
            sources=torch.from_numpy(sources.astype(np.int64)),
            owners=torch.from_numpy(_places_in(summed, owners)),
            labelled=np.flatnonzero((pools == PoolingMode.LABELS) & ends_here),
            scored=scored,
            tokens=_padded([self._tokens[int(slot)] for slot in batch.slots[scored]]),
        )

    def rehearsal(self, num_rows: int, num_tokens: int, spec: ModelSpec) -> PoolingWork:
        """Return work on dummy rows and on all tokens of a step, for warmup."""
        rows = np.arange(num_rows)
        scored = rows[: SCORED_SLICE if spec.generates else 0]
        places = torch.arange(num_tokens)
        return PoolingWork(
            only=True,
            places=places,
            summed=rows[:1],
            sources=num_rows + places,
            owners=torch.zeros_like(places),
            labelled=rows if spec.num_labels else rows[:0],
            scored=scored,
            tokens=_padded([(0,)] * len(scored)),
        )


def _places_in(rows: _Rows, wanted: _Rows) -> NDArray[np.int64]:
    """Return the place of each wanted row in `rows`, which are distinct."""
    order = np.argsort(rows)
    return order[np.searchsorted(rows, wanted, sorter=order)].astype(np.int64)


def _padded(rows: list[tuple[int, ...]]) -> Tensor:
    longest = max(map(len, rows), default=0)
    return (
        torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
        .long()
        .view(len(rows), longest)
    )


def of_rows(parts: Pooled) -> Mapping[int, NDArray[np.float32]]:
    """Return the result of each row, from parts in host memory."""
    return {
        row: values[place].numpy()
        for rows, values in parts
        for place, row in enumerate(rows.tolist())
    }
