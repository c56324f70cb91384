"""Recurrent states of requests: cells in pages, and which pages a step's rows read and write.

A state is a list of pages. A cell is one head's tensor in one layer, within one page. A step reads
a row's state from one list of pages and may write it to another. That is also how a state is
copied, initialised (read -1: zeros) and saved. No other operation copies or clears a state.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cpu.operators import States

FEW = 16  # tokens: rows of at most FEW are processed token by token, side by side


class CellView(NamedTuple):
    """One tensor of one layer's states, as cells in pages.

    Attributes:
        view: [num_pages, cells_per_page, *shape], any strides of the first two dimensions, cells
            contiguous.
        first_page: index of the page of cell 0 among a state's pages.
        first: number of the cell of head 0.
        step: difference between the cells of consecutive heads.
        heads: heads of the layer.
    """

    view: Tensor
    first_page: int
    first: int
    step: int
    heads: int

    def where(self) -> tuple[Tensor, Tensor]:
        """Return each head's page among a state's pages, and its index in that page."""
        cells = self.first + self.step * torch.arange(self.heads, device=self.view.device)
        return self.first_page + cells // self.view.shape[1], cells % self.view.shape[1]

    def read(self, pages: Tensor) -> Tensor:
        """Return the cells of n states, [n, heads, *shape], zeros if pages are -1. Only for torch,
        like `write`.

        Args:
            pages: int [n, state_pages].
        """
        page, place = self.where()
        mine = pages[:, page].long()
        found = self.view[mine.clamp(min=0), place]
        return found.masked_fill_((mine < 0).view(*mine.shape, *[1] * (found.ndim - 2)), 0)

    def write(self, pages: Tensor, state: Tensor) -> None:
        """Write cells in the form that `read` returns. States without pages are not written."""
        kept = pages[:, 0] >= 0
        if not bool(kept.all()):
            pages, state = pages[kept], state[kept]
        self.put(pages, state)

    def put(self, pages: Tensor, state: Tensor) -> None:
        """Write cells of states that all have pages, without waiting for the device."""
        page, place = self.where()
        self.view[pages[:, page].long(), place] = state


@dataclass(frozen=True, slots=True, eq=False)
class StateRows:
    """The rows of a step, and their states. All tensors are int32 and contiguous.

    Attributes:
        starts: [num_rows + 1], in tokens.
        reads, writes: [num_rows, state_pages], pages of the state before the row's first token and
            after its last one. A row of -1: zeros, or not written.
        marks: [num_rows], number of the row's tokens after which its state is also written to the
            pages of `kept`. 0: not written.
        kept: shaped like `reads`.
        num_decodes: number of rows at the end that have one token each, and no mark.
    """

    starts: Tensor
    reads: Tensor
    writes: Tensor
    marks: Tensor
    kept: Tensor
    num_decodes: int

    @property
    def num_rows(self) -> int:
        return self.reads.shape[0]

    def has_long_rows(self, num_tokens: int) -> bool:
        """Return whether rows have more than FEW tokens on average, without reading `starts`.

        Args:
            num_tokens: of all rows.
        """
        return num_tokens - self.num_decodes > FEW * (self.num_rows - self.num_decodes)

    def check(self) -> None:
        """Raise ValueError unless the tensors fit each other."""
        num_rows, shape = self.num_rows, self.reads.shape
        if self.writes.shape != shape or self.kept.shape != shape:
            raise ValueError(
                f"reads {tuple(shape)}, writes {tuple(self.writes.shape)} and kept "
                f"{tuple(self.kept.shape)} have different shapes"
            )
        if self.starts.shape != (num_rows + 1,) or self.marks.shape != (num_rows,):
            raise ValueError(
                f"starts {tuple(self.starts.shape)} and marks "
                f"{tuple(self.marks.shape)} do not fit {num_rows} rows"
            )
        tensors = (self.starts, self.reads, self.writes, self.marks, self.kept)
        if any(each.dtype != torch.int32 or not each.is_contiguous() for each in tensors):
            raise ValueError("rows of states: contiguous int32 tensors expected")


def addresses(cells: CellView, rows: StateRows) -> States:
    """Return the arguments of compiled operations, valid as long as the tensors live."""
    view = cells.view
    tensors = (rows.starts, rows.reads, rows.writes, rows.marks, rows.kept)
    return States(
        view.data_ptr(),
        *view.stride()[:2],
        view.shape[1],
        cells.first_page,
        cells.first,
        cells.step,
        *(each.data_ptr() for each in tensors),
        *rows.reads.shape,
    )


def token_by_token(
    cells: CellView, rows: StateRows, one: Callable[[Tensor, Tensor], Tensor]
) -> Sequence[int]:
    """Process all rows of at most FEW tokens, side by side, in torch. A row that verifies drafts is
    computed like a decode row.

    Args:
        one: takes the indices int64 [n] of tokens in the step, and the states [n, heads, *shape]
            before them, which it may overwrite. Returns the states after them.
    Returns:
        The numbers of the other rows.
    """
    starts, marks = rows.starts.tolist(), rows.marks.tolist()
    counts = [end - start for start, end in itertools.pairwise(starts)]
    few = sorted((row for row, n in enumerate(counts) if n <= FEW), key=lambda row: -counts[row])

    def of(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=cells.view.device)

    state = cells.read(rows.reads[of(few)])
    for done in itertools.count():
        left = [row for row in few if counts[row] > done]
        if len(left) < len(few):
            cells.write(rows.writes[of(few[len(left) :])], state[len(left) :])
        if not left:
            break
        few = left
        state = one(of([starts[row] + done for row in few]), state[: len(few)])
        marked = [place for place, row in enumerate(few) if marks[row] == done + 1]
        if marked:
            cells.write(rows.kept[of([few[place] for place in marked])], state[of(marked)])
    return [row for row, count in enumerate(counts) if count > FEW]
