"""Grouping of a step's tokens by adapter, as the low-rank products need it."""

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.adapters.low_rank import TILE_ROWS, TokensBySlot


def tokens_by_slot(slots: NDArray[np.integer], num_slots: int) -> TokensBySlot:
    """Return the tokens grouped by slot, in host memory. O(tokens).

    Args:
        slots: of each token. -1: it has no adapter.
    """
    present = np.flatnonzero(slots >= 0)
    order = present[np.argsort(slots[present], kind="stable")].astype(np.int32)
    counts = np.bincount(slots[present], minlength=num_slots)
    ends = np.cumsum(counts)
    spans = tuple(
        (slot, end - count, end)
        for slot, (count, end) in enumerate(zip(counts.tolist(), ends.tolist(), strict=True))
        if count
    )
    tiles = [
        (slot, first, min(first + TILE_ROWS, end))
        for slot, start, end in spans
        for first in range(start, end, TILE_ROWS)
    ]
    return TokensBySlot(
        torch.from_numpy(order), torch.tensor(tiles, dtype=torch.int32).view(-1, 3), spans
    )
