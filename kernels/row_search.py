"""The search for a program's row, in kernels whose programs share the rows of a step."""

import triton
import triton.language as tl

SEARCH_BLOCK = 256  # rows that `last_at_most` compares at once


@triton.jit
def last_at_most(
    starts_ptr,
    num_rows,
    value,
    DIVISOR: tl.constexpr,
    BY_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the last row r with starts[r] // DIVISOR + BY_ROW * r <= value. starts ascends.

    Compares all rows at once, because the steps of a binary search would wait for memory one by
    one.
    """
    count = 0
    for first in range(0, num_rows, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        starts = tl.load(starts_ptr + rows, mask=rows < num_rows, other=0)
        reached = (starts // DIVISOR + BY_ROW * rows <= value) & (rows < num_rows)
        count += tl.sum(reached.to(tl.int32))
    return count - 1
