"""One step as tensors, made from the scheduler's decision and the request table.

Built on the engine thread by column operations, a few per step whatever the number of rows; every
tensor is a copy, so that a launched forward never sees the table change.
"""

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.rows.batch import ForwardMode, Ints, ScheduleBatch
from common.engine.rows.table import RequestTable
from common.engine.rows.upload import packed_bytes, upload
from kernels.sampling import SamplingColumns

# So many times the tokens that there are: whole rows are copied as much faster than single pages.
MAX_PADDING = 4


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """Rows are consecutive ranges of tokens. Nothing of it is ever changed in place.

    Padding, which gives a captured graph its size, are decode rows of length 0 with token 0 at
    location -1: they read and write no page, and nobody wants their logits.
    """

    token_ids: Tensor  # int32 [num_tokens]; -(slot + 1): the last token sampled in that slot
    positions: Tensor  # int32 [num_tokens], token indices
    locations: Tensor  # int64 [num_tokens], page * page_size + offset: where its K and V go
    lengths: Tensor  # int32 [num_rows], tokens of the request up to this step's last
    page_starts: Tensor  # int32 [num_rows]: row i's pages are page_ids[page_starts[i] + j]
    query_starts: Tensor  # int32 [num_rows + 1], in tokens
    sampled: Tensor  # int64 [num_rows], the tokens whose logits are wanted: the last of each row
    page_ids: Tensor  # int32 [any]
    slots: Tensor  # int64 [num_rows without padding]
    sampling: SamplingColumns | None  # None: every row takes its likeliest token
    num_decodes: int  # of the last rows, how many have one token each

    @property
    def num_rows(self) -> int:
        return self.lengths.shape[0]

    @property
    def packed_bytes(self) -> int:
        """What `to` needs of its destination."""
        return packed_bytes(self._tensors())

    def padded(self, num_rows: int) -> "ForwardBatch":
        """A decode step as one of so many rows. `slots` and `sampling` stay as they are."""
        added = num_rows - self.num_rows
        if not added:
            return self
        places = torch.arange(num_rows + 1)
        return replace(
            self,
            token_ids=_grown(self.token_ids, added, 0),
            positions=_grown(self.positions, added, 0),
            locations=_grown(self.locations, added, -1),
            lengths=_grown(self.lengths, added, 0),
            page_starts=_grown(self.page_starts, added, 0),
            query_starts=places.int(),
            sampled=places[:-1],
            num_decodes=num_rows,
        )

    def to(self, device: torch.device, into: Tensor | None = None) -> "ForwardBatch":
        """The batch on the device, see `upload`. What a graph reads comes first."""
        uploaded = upload(self._tensors(), device, into)
        sampling = None
        if self.sampling is not None:
            columns = uploaded[len(_TENSORS) :]
            sampling = SamplingColumns(**dict(zip(_SAMPLING, columns, strict=True)))
        return ForwardBatch(
            **dict(zip(_TENSORS, uploaded, strict=False)),
            sampling=sampling,
            num_decodes=self.num_decodes,
        )

    def _tensors(self) -> list[Tensor]:
        tensors = [getattr(self, name) for name in _TENSORS]
        if self.sampling is not None:
            tensors += [getattr(self.sampling, name) for name in _SAMPLING]
        return tensors


_TENSORS = tuple(f.name for f in fields(ForwardBatch) if f.name not in ("sampling", "num_decodes"))
_SAMPLING = tuple(f.name for f in fields(SamplingColumns))


def _grown(tensor: Tensor, added: int, filler: int) -> Tensor:
    return torch.cat((tensor, tensor.new_full((added,), filler)))


class BatchBuilder:
    """Makes the tensors of steps, in host memory. Engine thread only."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        # Where every row has one token the places of tokens are 0, 1, 2, ...
        self._places = np.arange(table.num_slots + 1)
        self._rows_32 = np.arange(table.num_slots + 1, dtype=np.int32)
        self._places_32 = torch.from_numpy(self._rows_32)
        self._places_64 = torch.arange(table.num_slots + 1)

    def build(self, batch: ScheduleBatch) -> ForwardBatch:
        """O(tokens + pages of all rows)."""
        slots, starts, ends = batch.slots.astype(np.intp), batch.starts, batch.ends
        num_rows = len(slots)
        page_ids, page_starts = self._pages(slots, ends)
        lengths = torch.from_numpy(ends)
        if batch.mode is ForwardMode.DECODE:
            token_ids, locations = self._tokens(slots, starts)
            return ForwardBatch(
                token_ids=token_ids,
                positions=torch.from_numpy(starts),
                locations=locations,
                lengths=lengths,
                page_starts=page_starts,
                query_starts=self._places_32[: num_rows + 1],
                sampled=self._places_64[:num_rows],
                page_ids=page_ids,
                slots=torch.from_numpy(slots),
                sampling=self._sampling(slots, ends),
                num_decodes=num_rows,
            )
        counts = ends - starts
        query_starts = np.zeros(num_rows + 1, np.int32)
        np.cumsum(counts, out=query_starts[1:])
        rows = np.repeat(self._places[:num_rows], counts)
        first_places = query_starts[:-1]
        positions = np.arange(len(rows), dtype=np.int32) - (first_places - starts)[rows]
        token_ids, locations = self._tokens(slots[rows], positions)
        long_rows = (counts != 1).nonzero()[0]
        return ForwardBatch(
            token_ids=token_ids,
            positions=torch.from_numpy(positions),
            locations=locations,
            lengths=lengths,
            page_starts=page_starts,
            query_starts=torch.from_numpy(query_starts),
            sampled=torch.from_numpy(query_starts[1:].astype(np.int64) - 1),
            page_ids=page_ids,
            slots=torch.from_numpy(slots),
            sampling=self._sampling(slots, ends),
            num_decodes=num_rows - 1 - int(long_rows[-1]) if len(long_rows) else num_rows,
        )

    def _pages(self, slots: NDArray[np.intp], ends: Ints) -> tuple[Tensor, Tensor]:
        """Pages of rows of such lengths, and where each row's start: row after row, or all rows as
        wide as the longest where that is little more."""
        table, size = self._table, self._table.page_size
        longest = int(np.maximum.reduce(ends))
        if len(slots) * longest <= MAX_PADDING * int(np.add.reduce(ends)):
            num_pages = -(-longest // size)
            page_ids = table.page_table[slots, :num_pages].reshape(-1)
            page_starts = self._rows_32[: len(slots)] * np.int32(num_pages)
        else:
            counts = -(-ends // np.int32(size))
            page_starts = np.cumsum(counts, dtype=np.int32) - counts
            rows = np.repeat(self._places[: len(slots)], counts)
            columns = np.arange(len(rows)) - page_starts[rows]
            page_ids = table.page_table[slots[rows], columns]
        return torch.from_numpy(page_ids), torch.from_numpy(page_starts)

    def _tokens(self, slots: NDArray[np.intp], positions: Ints) -> tuple[Tensor, Tensor]:
        """Ids and locations of tokens, each given by its slot and its index."""
        table = self._table
        token_ids = table.tokens[slots, positions]
        unknown = positions >= table.known[slots]
        if np.count_nonzero(unknown):
            token_ids = np.where(unknown, (-1 - slots).astype(np.int32), token_ids)
        size = table.page_size
        pages, offsets = np.divmod(positions.astype(np.intp), size)
        locations = table.page_table[slots, pages] * np.int64(size) + offsets
        return torch.from_numpy(token_ids), torch.from_numpy(locations)

    def _sampling(self, slots: NDArray[np.intp], positions: Ints) -> SamplingColumns | None:
        table = self._table
        greedy = table.greedy[slots]
        if np.count_nonzero(greedy) == len(slots):
            return None
        return SamplingColumns(
            temperature=torch.from_numpy(table.temperature[slots]),
            top_k=torch.from_numpy(table.top_k[slots]),
            top_p=torch.from_numpy(table.top_p[slots]),
            min_p=torch.from_numpy(table.min_p[slots]),
            seeds=torch.from_numpy(table.seed[slots].view(np.int32).reshape(-1, 2)),
            positions=torch.from_numpy(positions),
        )
