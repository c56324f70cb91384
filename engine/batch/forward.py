"""The inputs of one step, built from the scheduler's decision and the slot table.

The engine thread builds a step with a few column operations, whatever the number of rows. Columns
stay numpy arrays until the single copy to the device, because each conversion to a tensor and back
takes microseconds. Every column is a copy, so that a launched forward never sees the table change.
"""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, Self, TypeVar

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from engine.batch.batch import ForwardMode, Ints, ScheduleBatch
from engine.batch.holding import NO_PAGE, ONE
from engine.batch.images import RowImages, VisibleEmbeddings, VisibleImage
from engine.batch.request import Request
from engine.batch.table import SlotTable
from engine.batch.upload import HostColumn, upload
from kernels.linear_attention.state_cells import StateRows

# Maximum padding as a multiple of the real tokens. Copying whole rows is faster than copying single
# pages by about this factor.
MAX_PADDING = 4
_Column = TypeVar("_Column", HostColumn, Tensor)
_ONE_FULL = (None,)  # windows of a model with one page table and no sliding window


class _Rows(msgspec.Struct, Generic[_Column], frozen=True, eq=False):
    """The rows of a step as consecutive ranges of tokens. Immutable.

    A request has one or more page tables. Each layer's KV is in the pages of one table (KVLayout).
    Tuples have one entry per table. Each entry is a separate column, because kernels are compiled
    for the alignment of a tensor's start.

    A captured graph needs fixed numbers of tokens and rows. Padding consists of rows of length 0,
    whose tokens are 0 at location -1. They read and write no page, and their logits are not used.

    positions: the rotary position of each token. It equals the token's index, except in requests
    with axial images. If the step has tokens of such images, there is one entry for time, row and
    column: [3, num_tokens]. Image tokens and tokens with input embeddings have id 0 here, and
    `seen` has their images or embeddings.
    """

    token_ids: _Column  # int32 [num_tokens], -(slot + 1) means the last token sampled in that slot
    # int64 [num_tokens]: page * page_size + offset, where the token's KV is written.
    locations: tuple[_Column, ...]
    page_starts: tuple[_Column, ...]  # int32 [num_rows]: row i's pages are page_ids[starts[i] + j]
    positions: _Column  # int32 [num_tokens], or [3, num_tokens]
    lengths: _Column  # int32 [num_rows]: tokens of the request up to the last one of this step
    query_starts: _Column  # int32 [num_rows + 1], in tokens
    # int64 [any]: tokens whose logits are needed: the last of each row, then others
    sampled: _Column
    # State pages, see kernels/linear_attention: int32 [num_rows, state pages], and [num_rows] for
    # marks. A row with drafts writes its state to `state_kept`, only after verification.
    state_reads: _Column
    state_writes: _Column
    state_marks: _Column
    state_kept: _Column
    page_ids: _Column  # int32 [any]
    slots: _Column  # int64 [num_rows without padding]
    num_decodes: int  # number of rows at the end that have one token each
    seen: tuple[VisibleImage | VisibleEmbeddings, ...]
    # Number of tokens and length of each row before the decode rows, as known on the host. The
    # device may shorten rows whose drafts are rejected. (): no latents are expanded.
    extends: tuple[tuple[int, int], ...]

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def is_decode(self) -> bool:
        """Return whether each row has one token and no other logits are needed."""
        return self.num_decodes == len(self.lengths) == len(self.sampled)

    def columns(self) -> list[_Column]:
        """Return all columns, contiguous. The first one is `token_ids`."""
        return [
            self.token_ids,
            *self.locations,
            *self.page_starts,
            *(getattr(self, name) for name in _COLUMNS),
        ]

    @classmethod
    def of(
        cls,
        columns: Sequence[_Column],
        num_decodes: int,
        seen: tuple[VisibleImage | VisibleEmbeddings, ...],
        extends: tuple[tuple[int, int], ...],
    ) -> Self:
        """Return a batch with these `columns`, which may be copies of the columns of another
        batch."""
        tables = (len(columns) - 1 - len(_COLUMNS)) // 2
        return cls(
            token_ids=columns[0],
            locations=tuple(columns[1 : 1 + tables]),
            page_starts=tuple(columns[1 + tables : 1 + 2 * tables]),
            **dict(zip(_COLUMNS, columns[1 + 2 * tables :], strict=True)),
            num_decodes=num_decodes,
            seen=seen,
            extends=extends,
        )


# The columns after the tuples of tensors.
_COLUMNS = _Rows.__struct_fields__[3:-3]
# The last `columns`: their sizes depend on more than the numbers of tokens and rows.
NUM_VARYING = 2


class ForwardBatch(_Rows[Tensor], frozen=True, eq=False):
    """The rows of a step as a forward reads them, on the device."""

    @property
    def starts(self) -> Tensor:
        """Index of each row's first token of this step, int32 [num_rows]."""
        return self.lengths - self.query_starts.diff()

    @property
    def states(self) -> StateRows:
        return StateRows(
            self.query_starts,
            self.state_reads,
            self.state_writes,
            self.state_marks,
            self.state_kept,
            self.num_decodes,
        )

    def movable(self) -> "ForwardBatch":
        """Return the same step, with own memory for the tensors that change if rows begin early. On
        a CPU, an uploaded step is in the memory of its host columns."""
        return replace(
            self,
            token_ids=self.token_ids.clone(),
            positions=self.positions.clone(),
            lengths=self.lengths.clone(),
            locations=tuple(each.clone() for each in self.locations),
        )

    def states_after(self, counts: Tensor) -> StateRows:
        """Return the states of the rows before the decode rows, to be written after verification.
        Rows without drafts have written theirs before, and write nothing.

        Args:
            counts: int32 [num_rows]: number of the row's tokens after which its state is written.
                Any number for rows without drafts.
        """
        rows = self.num_rows - self.num_decodes
        return StateRows(
            self.query_starts[: rows + 1],
            self.state_reads[:rows],
            torch.full_like(self.state_writes[:rows], NO_PAGE),
            torch.where((self.state_kept[:rows] >= 0).any(1), counts[:rows], 0),
            self.state_kept[:rows],
            0,
        )


class HostBatch(_Rows[HostColumn], frozen=True, eq=False):
    """The rows of a step in host memory, before their copy to the device."""

    def wanting(self, places: Sequence[HostColumn]) -> Self:
        """Return the same step with additional logits, of these tokens (int64 [any])."""
        return replace(self, sampled=np.concatenate((self.sampled, *places)))

    def to(
        self, device: torch.device, beside: Sequence[HostColumn] = ()
    ) -> tuple[ForwardBatch, list[Tensor]]:
        """Copy the batch and the columns in `beside` to the device. See `upload`."""
        own = self.columns()
        uploaded = upload([*own, *beside], device)
        batch = ForwardBatch.of(uploaded[: len(own)], self.num_decodes, self.seen, self.extends)
        return batch, uploaded[len(own) :]


class _RaggedRows(NamedTuple):
    """Where the tokens of rows of any length are. It depends only on the lengths.

    Attributes:
        query_starts, sampled: see _Rows.
        rows: row of each token.
        numbers: int32 [num_tokens], number of each token in its row.
        newest: place of each row's last token that is no draft.
        counts_before_decodes: tokens of each row up to the last one with several tokens.
    """

    query_starts: Ints
    sampled: NDArray[np.int64]
    rows: NDArray[np.intp]
    numbers: Ints
    newest: NDArray[np.integer[Any]]
    counts_before_decodes: list[int]

    @classmethod
    def of(cls, counts: Ints, *, verify: bool = False) -> Self:
        """Return the rows with these numbers of tokens.

        Args:
            verify: all tokens of a row except its first are drafts.
        """
        query_starts = np.zeros(len(counts) + 1, np.int32)
        np.add.accumulate(counts, out=query_starts[1:])
        rows = np.arange(len(counts)).repeat(counts)
        numbers = np.arange(len(rows), dtype=np.int32) - query_starts[rows]
        sampled = last = query_starts[1:].astype(np.int64) - 1
        newest: NDArray[np.integer[Any]] = last
        if verify:
            before_last = np.ones(len(rows), np.bool_)
            before_last[last] = False
            sampled = np.concatenate((last, before_last.nonzero()[0]))
            newest = query_starts[:-1]
        long_rows = (counts != 1).nonzero()[0]
        past = 1 + int(long_rows[-1]) if len(long_rows) else 0
        return cls(query_starts, sampled, rows, numbers, newest, counts[:past].tolist())


class BatchBuilder:
    """Builds the inputs of a step in host memory. Engine thread only.

    Args:
        axial_images: see RowImages.
    """

    def __init__(self, table: SlotTable, *, axial_images: bool = False) -> None:
        self._table = table
        self._images = RowImages(table, axial_images)
        table.add_listener(self._acquire_images)
        self._windows = table.tables.windows
        # Arrays, see ONE.
        self._page_size = np.array(table.page_size, np.int64)
        self._page_size_32 = np.array(table.page_size, np.int32)
        # If every row has one token, the tokens' offsets are 0, 1, 2, ...
        self._places = np.arange(table.num_slots + 1)
        self._places_32 = self._places.astype(np.int32)
        # Where rows of `_num_pages` pages start, as in the newest step of such rows.
        self._num_pages, self._row_starts = 1, self._places_32
        # The rows of the newest step that had other rows than a decode step.
        self._ragged_key, self._ragged = (False, b""), _RaggedRows.of(np.zeros(0, np.int32))
        # Kept states and their marks of rows that keep none.
        self._no_page = np.full((table.num_slots, table.state.shape[1]), NO_PAGE, np.int32)
        self._no_marks = np.zeros(table.num_slots, np.int32)
        self._stateless: dict[int, dict[str, HostColumn]] = {}  # by number of rows

    def build(self, batch: ScheduleBatch) -> HostBatch:
        """Build the inputs of a step. O(tokens + pages of all rows)."""
        built = self._of_tokens(batch)
        if self._images.empty or not self._images.among(batch):
            return built
        shown = self._images.shown(batch, built.query_starts, built.token_ids, built.positions)
        return replace(built, token_ids=shown.token_ids, positions=shown.positions, seen=shown.seen)

    def _acquire_images(self, slot: int, request: Request) -> None:
        spec = request.spec
        if not self._images.empty or spec.images or spec.input_embeddings is not None:
            self._images.acquire(slot, request)

    def _of_tokens(self, batch: ScheduleBatch) -> HostBatch:
        """Build the step as if no row had images."""
        slots, starts, ends = batch.slots.astype(np.intp), batch.starts, batch.ends
        num_rows = len(slots)
        page_ids, page_starts = self._pages(slots, batch)
        if self._table.state.shape[1]:
            states = self._states(batch, slots)
        elif (known := self._stateless.get(num_rows)) is not None:  # the case of most models
            states = known
        else:
            states = self._stateless[num_rows] = self._states(batch, slots)
        extends: tuple[tuple[int, int], ...] = ()
        if batch.mode is ForwardMode.DECODE:
            query_starts, sampled = self._places_32[: num_rows + 1], self._places[:num_rows]
            positions = starts
            token_ids, locations = self._tokens(slots, starts, slots, starts, sampled)
        else:
            ragged = self._ragged_rows(ends - starts, verify=batch.mode is ForwardMode.VERIFY)
            query_starts, sampled = ragged.query_starts, ragged.sampled
            positions = starts.take(ragged.rows)
            positions += ragged.numbers
            newest = starts if batch.mode is ForwardMode.VERIFY else ends - ONE
            token_ids, locations = self._tokens(
                slots.take(ragged.rows), positions, slots, newest, ragged.newest
            )
            counts = ragged.counts_before_decodes
            extends = tuple(zip(counts, ends[: len(counts)].tolist(), strict=True))
        return HostBatch(
            token_ids=token_ids,
            positions=positions,
            locations=locations,
            lengths=ends,
            page_starts=page_starts,
            query_starts=query_starts,
            sampled=sampled,
            **states,
            page_ids=page_ids,
            slots=slots,
            num_decodes=num_rows - len(extends),
            seen=(),
            extends=extends,
        )

    def _ragged_rows(self, counts: Ints, *, verify: bool) -> _RaggedRows:
        """Return where the tokens of rows are. Most steps are like the previous one."""
        key = verify, counts.tobytes()
        if key != self._ragged_key:
            self._ragged_key, self._ragged = key, _RaggedRows.of(counts, verify=verify)
        return self._ragged

    def _states(self, batch: ScheduleBatch, slots: NDArray[np.intp]) -> dict[str, HostColumn]:
        reads = writes = own = self._table.state[slots]
        kept, marks = self._no_page[: len(slots)], self._no_marks[: len(slots)]
        if np.count_nonzero(batch.starts) != len(slots):
            reads = np.where(batch.starts[:, None] == 0, NO_PAGE, own)
        if batch.mode is ForwardMode.VERIFY:
            drafted = batch.ends - batch.starts > 1
            if np.count_nonzero(drafted) == len(slots):
                kept, writes = own, kept
            else:
                each = drafted[:, None]
                kept, writes = np.where(each, own, NO_PAGE), np.where(each, NO_PAGE, own)
        if batch.resumed:
            reads = reads.copy()
            for state in batch.resumed:
                reads[state.row] = state.pages
        if batch.kept:
            kept, marks = kept.copy(), marks.copy()
            for state in batch.kept:
                kept[state.row], marks[state.row] = state.pages, state.num_tokens
        return {
            "state_reads": reads,
            "state_writes": writes,
            "state_marks": marks,
            "state_kept": kept,
        }

    def _pages(
        self, slots: NDArray[np.intp], batch: ScheduleBatch
    ) -> tuple[HostColumn, tuple[HostColumn, ...]]:
        """Return the page ids of the rows, and where each row starts among them. In a table with a
        window, starts are shifted as if the pages before the window were listed."""
        if self._windows == _ONE_FULL:  # the case of most models: nothing to concatenate
            page_ids, page_starts = self._all_pages(0, slots, batch.ends)
            return page_ids, (page_starts,)
        starts, ends = batch.starts, batch.ends
        if batch.early is not None:
            starts = starts - batch.early
        found = [
            self._all_pages(table, slots, ends)
            if window is None
            else self._seen_pages(table, slots, np.maximum(starts - np.int32(window - 1), 0), ends)
            for table, window in enumerate(self._windows)
        ]
        firsts = np.cumsum([0, *(len(ids) for ids, _ in found[:-1])], dtype=np.int32)
        return (
            np.concatenate([ids for ids, _ in found]),
            tuple(starts + first for (_, starts), first in zip(found, firsts, strict=True)),
        )

    def _all_pages(self, table: int, slots: NDArray[np.intp], ends: Ints) -> tuple[Ints, Ints]:
        """Return the pages row by row, or padded to the longest row if the padding is small."""
        longest = int(np.maximum.reduce(ends))
        if len(slots) * longest <= MAX_PADDING * int(np.add.reduce(ends)):
            num_pages = -(-longest // self._table.page_size)
            page_ids = self._table.by_table[table][slots, :num_pages].reshape(-1)
            if num_pages != self._num_pages:
                self._num_pages, self._row_starts = num_pages, self._places_32 * np.int32(num_pages)
            return page_ids, self._row_starts[: len(slots)]
        return self._row_by_row(table, slots, -(-ends // self._page_size_32))

    def _seen_pages(
        self, table: int, slots: NDArray[np.intp], oldest: Ints, ends: Ints
    ) -> tuple[Ints, Ints]:
        """Return the pages that contain tokens [oldest[i], ends[i]) of each row."""
        size = self._page_size_32
        firsts = oldest // size
        page_ids, starts = self._row_by_row(table, slots, -(-ends // size) - firsts, firsts)
        return page_ids, starts - firsts

    def _row_by_row(
        self, table: int, slots: NDArray[np.intp], counts: Ints, firsts: Ints | None = None
    ) -> tuple[Ints, Ints]:
        starts = np.cumsum(counts, dtype=np.int32) - counts
        rows = np.repeat(self._places[: len(slots)], counts)
        columns = np.arange(len(rows)) - (starts if firsts is None else starts - firsts)[rows]
        return self._table.by_table[table][slots[rows], columns], starts

    def _tokens(
        self,
        slots: NDArray[np.intp],
        positions: Ints,
        slots_of_rows: NDArray[np.intp],
        newest: Ints,
        newest_places: NDArray[np.integer[Any]],
    ) -> tuple[HostColumn, tuple[HostColumn, ...]]:
        """Return ids and locations of tokens, each given by its slot and its index.

        Args:
            newest, newest_places: index of each row's last token that is no draft, and its place
                among the tokens. No other token can be unknown.
        """
        table, places = self._table, positions.astype(np.intp)
        unknown = newest >= table.known[slots_of_rows]
        num_unknown = np.count_nonzero(unknown)
        if num_unknown == len(slots):  # the case of most steps with overlap
            token_ids = np.invert(slots, dtype=np.int32)  # -(slot + 1)
        else:
            token_ids = table.tokens[slots, places]
            if num_unknown == len(newest):
                token_ids[newest_places] = ~slots_of_rows
            elif num_unknown:
                token_ids[newest_places[unknown]] = ~slots_of_rows[unknown]
        pages = places // self._page_size
        locations = [
            (mine[slots, pages] - pages) * self._page_size + places for mine in table.by_table
        ]
        return token_ids, tuple(locations)
