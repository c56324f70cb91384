"""States in pages of NaN, for tests of kernels that read and write them."""

import math

import torch

from kernels.linear_attention.state_cells import CellView, StateRows
from tests.kernels.conftest import DEVICE

NUM_PAGES = 40
NONE = -1


def pages_of(states, num_pages):
    """Return int32 [len(states), num_pages]: state i has pages i, i + 10, i + 20, ..., and NONE
    has none."""
    pages = [[s if s == NONE else s + 10 * j for j in range(num_pages)] for s in states]
    return torch.tensor(pages, dtype=torch.int32, device=DEVICE).view(len(states), num_pages)


def rows_of(counts, reads, writes, *, marks=None, kept=None, num_pages=4):
    """Return rows of these numbers of tokens, with states numbered as in `pages_of`."""
    num_rows = len(counts)
    starts = torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE)
    marks = torch.tensor(marks or [0] * num_rows, dtype=torch.int32, device=DEVICE)
    num_decodes = next((i for i, c in enumerate(reversed(counts)) if c != 1), num_rows)
    return StateRows(
        starts,
        pages_of(reads, num_pages),
        pages_of(writes, num_pages),
        marks,
        pages_of(kept or [NONE] * num_rows, num_pages),
        num_decodes,
    )


def cells_of(heads, shape, *, dtype=torch.float32, per_page=2, step=1, first=0, first_page=0):
    """Return a CellView whose pages, and the memory between them, are NaN."""
    size = math.prod(shape)
    width = per_page * (size + 3)
    pool = torch.full((NUM_PAGES, width), math.nan, dtype=dtype, device=DEVICE)
    strides = (width, size + 3, *torch.empty(shape, device="meta").stride())
    view = pool.as_strided((NUM_PAGES, per_page, *shape), strides)
    return CellView(view, first_page, first, step, heads), pool


def put(cells, state, values):
    cells.write(pages_of([state], 4), values.unsqueeze(0).to(cells.view.dtype))


def get(cells, state):
    return cells.read(pages_of([state], 4))[0]
