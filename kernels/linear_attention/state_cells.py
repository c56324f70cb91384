"""States that requests have instead of keys and values: cells in pages, and which pages of which
request a step reads and writes.

A state is a list of pages; a cell is one head's tensor of one layer, and lies in one of them. A
step reads a row's state in one place and may write it in another: that is how a state is copied,
begun (read -1: zeros) and kept for later, and nothing else copies or clears one.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

FEW = 16  # tokens of a row: with so many it is taken through them one by one, beside others


class CellView(NamedTuple):
    """One tensor of one layer's states, cell by cell.

    view: [num_pages, cells_per_page, *shape], any strides of the first two, of contiguous cells.
    first_page: of a state's pages, the one that has cell 0.
    first: the layer's cell of head 0, by number; step: from one head's to the next.
    heads: how many the layer has.
    """

    view: Tensor
    first_page: int
    first: int
    step: int
    heads: int

    def where(self) -> tuple[Tensor, Tensor]:
        """Of each head: its page among a state's, and its place in that page."""
        cells = self.first + self.step * torch.arange(self.heads, device=self.view.device)
        return self.first_page + cells // self.view.shape[1], cells % self.view.shape[1]

    def read(self, pages: Tensor) -> Tensor:
        """[n, heads, *shape] of n states, int [n, state_pages]; zeros where these are -1. Torch
        only, as `write`."""
        page, place = self.where()
        mine = pages[:, page].long()
        found = self.view[mine.clamp(min=0), place]
        return found.masked_fill_((mine < 0).view(*mine.shape, *[1] * (found.ndim - 2)), 0)

    def write(self, pages: Tensor, state: Tensor) -> None:
        """What `read` gives, of states with pages; the others are written nowhere."""
        page, place = self.where()
        kept = pages[:, 0] >= 0
        if not bool(kept.all()):
            pages, state = pages[kept], state[kept]
        self.view[pages[:, page].long(), place] = state


@dataclass(frozen=True, slots=True, eq=False)
class StateRows:
    """The rows of a step, and their states. All int32, contiguous.

    starts: [num_rows + 1], in tokens.
    reads, writes: [num_rows, state_pages], the state before the row's first token and after its
        last one; -1 in all of a row: zeros, and nowhere.
    marks: [num_rows]; after so many of the row's tokens its state goes to the pages of `kept`
        too, of the shape of `reads`; 0: nowhere.
    num_decodes: of the last rows, how many have one token each, and no mark.
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

    def check(self) -> None:
        """Raises ValueError where the tensors do not fit each other."""
        num_rows, shape = self.num_rows, self.reads.shape
        if self.writes.shape != shape or self.kept.shape != shape:
            raise ValueError(
                f"reads {tuple(shape)}, writes {tuple(self.writes.shape)} and kept "
                f"{tuple(self.kept.shape)} are not alike"
            )
        if self.starts.shape != (num_rows + 1,) or self.marks.shape != (num_rows,):
            raise ValueError(
                f"starts {tuple(self.starts.shape)} and marks "
                f"{tuple(self.marks.shape)} do not fit {num_rows} rows"
            )
        tensors = (self.starts, self.reads, self.writes, self.marks, self.kept)
        if any(each.dtype != torch.int32 or not each.is_contiguous() for each in tensors):
            raise ValueError("rows of states: contiguous int32 tensors expected")


def token_by_token(
    cells: CellView, rows: StateRows, one: Callable[[Tensor, Tensor], Tensor]
) -> Sequence[int]:
    """Torch only: takes all rows of FEW tokens or less through them, side by side. A row that
    verifies drafts is computed as one that decodes is.

    Args:
        one: of places int64 [n] among the step's tokens, and of states [n, heads, *shape] before
            them, its own, to those after them.
    Returns:
        The other rows, by number.
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
