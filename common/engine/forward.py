"""One step as tensors, made from the scheduler's decision and the request table.

Built on the engine thread by column operations, a few per step whatever the number of rows; every
tensor is a copy, so that a launched forward never sees the table change.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.batch import ForwardMode, Ints, ScheduleBatch
from common.engine.table import RequestTable
from kernels.sampling import SamplingColumns


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """Rows are consecutive ranges of tokens. Nothing of it is ever changed in place."""

    token_ids: Tensor  # int32 [num_tokens]; -(slot + 1): the last token sampled in that slot
    positions: Tensor  # int32 [num_tokens], token indices
    locations: Tensor  # int64 [num_tokens], page * page_size + offset: where its K and V go
    page_table: Tensor  # int32 [num_rows, pages of the longest row]
    query_starts: Tensor  # int32 [num_rows + 1], in tokens
    lengths: Tensor  # int32 [num_rows], tokens of the request up to this step's last
    sampled: Tensor  # int64 [num_sampled], the tokens whose logits are wanted
    slots: Tensor  # int64 [num_sampled]
    sampling: SamplingColumns | None  # None: every row takes its likeliest token

    def to(self, device: torch.device) -> "ForwardBatch":
        """On a CPU the batch itself, elsewhere an asynchronous copy on the current stream."""
        if device.type == "cpu":
            return self
        return ForwardBatch(
            token_ids=upload(self.token_ids, device),
            positions=upload(self.positions, device),
            locations=upload(self.locations, device),
            page_table=upload(self.page_table, device),
            query_starts=upload(self.query_starts, device),
            lengths=upload(self.lengths, device),
            sampled=upload(self.sampled, device),
            slots=upload(self.slots, device),
            sampling=None if self.sampling is None else _upload_sampling(self.sampling, device),
        )


def _upload_sampling(columns: SamplingColumns, device: torch.device) -> SamplingColumns:
    return SamplingColumns(
        temperature=upload(columns.temperature, device),
        top_k=upload(columns.top_k, device),
        top_p=upload(columns.top_p, device),
        min_p=upload(columns.min_p, device),
        seeds=upload(columns.seeds, device),
        positions=upload(columns.positions, device),
        filtered=upload(columns.filtered, device),
    )


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Onto a device through pinned memory, asynchronously on the current stream; torch keeps the
    staging copy until the device has read it. On a CPU the tensor itself."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class BatchBuilder:
    """Makes the tensors of steps, in host memory. Engine thread only."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        # Where every row has one token the places of tokens are 0, 1, 2, ...
        self._places = np.arange(table.num_slots + 1)
        self._places_32 = torch.arange(table.num_slots + 1, dtype=torch.int32)
        self._places_64 = torch.arange(table.num_slots + 1)

    def build(self, batch: ScheduleBatch) -> ForwardBatch:
        """O(tokens + rows * pages of the longest row)."""
        slots, starts, ends = batch.slots.astype(np.intp), batch.starts, batch.ends
        num_rows = len(slots)
        num_pages = -(-int(ends.max()) // self._table.page_size)
        page_table = self._table.page_table[slots, :num_pages]
        lengths = torch.from_numpy(ends)
        if batch.mode is ForwardMode.DECODE:
            token_ids, locations = self._tokens(slots, starts, self._places[:num_rows], page_table)
            return ForwardBatch(
                token_ids=token_ids,
                positions=torch.from_numpy(starts),
                locations=locations,
                page_table=torch.from_numpy(page_table),
                query_starts=self._places_32[: num_rows + 1],
                lengths=lengths,
                sampled=self._places_64[:num_rows],
                slots=torch.from_numpy(slots),
                sampling=self._sampling(slots, ends),
            )
        counts = ends - starts
        query_starts = np.zeros(num_rows + 1, np.int32)
        np.cumsum(counts, out=query_starts[1:])
        rows = np.repeat(self._places[:num_rows], counts)
        first_places = query_starts[:-1]
        positions = np.arange(len(rows), dtype=np.int32) - (first_places - starts)[rows]
        token_ids, locations = self._tokens(slots[rows], positions, rows, page_table)
        sampled_slots = slots[batch.samples]
        return ForwardBatch(
            token_ids=token_ids,
            positions=torch.from_numpy(positions),
            locations=locations,
            page_table=torch.from_numpy(page_table),
            query_starts=torch.from_numpy(query_starts),
            lengths=lengths,
            sampled=torch.from_numpy(query_starts[1:][batch.samples].astype(np.int64) - 1),
            slots=torch.from_numpy(sampled_slots),
            sampling=self._sampling(sampled_slots, ends[batch.samples]),
        )

    def _tokens(
        self,
        slots: NDArray[np.intp],
        positions: Ints,
        rows: NDArray[np.int64],
        page_table: Ints,
    ) -> tuple[Tensor, Tensor]:
        """Ids and locations of tokens, each given by its slot, its index and its row."""
        table = self._table
        token_ids = table.tokens[slots, positions]
        unknown = positions >= table.known[slots]
        if np.count_nonzero(unknown):
            token_ids = np.where(unknown, (-1 - slots).astype(np.int32), token_ids)
        size = table.page_size
        places = positions.astype(np.intp)
        locations = page_table[rows, places // size] * np.int64(size) + places % size
        return torch.from_numpy(token_ids), torch.from_numpy(locations)

    def _sampling(self, slots: NDArray[np.intp], positions: Ints) -> SamplingColumns | None:
        table = self._table
        greedy = table.greedy[slots]
        if np.count_nonzero(greedy) == len(slots):
            return None
        top_k, top_p, min_p = table.top_k[slots], table.top_p[slots], table.min_p[slots]
        filtered = ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0)) & ~greedy
        return SamplingColumns(
            temperature=torch.from_numpy(table.temperature[slots]),
            top_k=torch.from_numpy(top_k),
            top_p=torch.from_numpy(top_p),
            min_p=torch.from_numpy(min_p),
            seeds=torch.from_numpy(table.seed[slots].view(np.int32).reshape(-1, 2)),
            positions=torch.from_numpy(positions),
            filtered=torch.from_numpy(filtered.nonzero()[0]),
        )
