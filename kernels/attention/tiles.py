"""What the attention kernels share: rows found on the device, and the loop over tiles of keys.

Scores are base-2 logarithms: log2(e) is part of their scale, and exp2 does.
"""

import math

import triton
import triton.language as tl

from kernels import device

SEARCH_BLOCK = 256  # rows that `last_at_most` looks at together
LOG2_E = tl.constexpr(math.log2(math.e))


def score_scales(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """What `attend_tiles` takes as scale and soft_cap."""
    if soft_cap is None:
        return scale * LOG2_E.value, 0.0
    return 2 * LOG2_E.value * scale / soft_cap, LOG2_E.value * soft_cap


def block(head_dim: int) -> int:
    """Return how many numbers a kernel reads at once of so many: a power of two that products
    take."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def stages_that_fit(
    wanted: int, *, rows: int, keys: int, head_dim: int, rest: int, kept: int, computed: int
) -> int:
    """Return how many stages of the pipeline of loads the device's shared memory has room for.

    One tile fewer than there are stages is under way. Beside them are the queries, the weights and
    a widened tile, each on its way to the operands of a product.

    Args:
        wanted: stages that are worth having, at least 1.
        rows: of queries in a program.
        keys: of a tile.
        head_dim: numbers of a value.
        rest: numbers that a key has beyond its value; 0 where a value is not part of its key.
        kept: bytes of a stored number.
        computed: bytes of a number in a product.
    """
    key = block(head_dim) + (block(rest) if rest else 0)
    numbers = keys * (key if rest else 2 * key)
    beside = rows * (key + keys) * computed
    if kept < computed:
        beside += numbers * computed
    return max(1, min(wanted, 1 + (device.shared_bytes() - beside) // (numbers * kept)))


@triton.jit
def last_at_most(
    starts_ptr,
    num_rows,
    value,
    DIVISOR: tl.constexpr,
    BY_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The last row r whose starts[r] // DIVISOR + BY_ROW * r is at most value; starts ascends.

    Counts all rows at once: the steps of a binary search would wait for memory one by one.
    """
    count = 0
    for first in range(0, num_rows, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        starts = tl.load(starts_ptr + rows, mask=rows < num_rows, other=0)
        reached = (starts // DIVISOR + BY_ROW * rows <= value) & (rows < num_rows)
        count += tl.sum(reached.to(tl.int32))
    return count - 1


@triton.jit
def attend_tiles(
    q,
    q_rest,
    acc,
    top,
    total,
    newest,
    kv_ptr,
    page_ids_ptr,
    first,
    last,
    begin,
    end,
    scale,
    soft_cap,
    PAGE_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    MASKED: tl.constexpr,
    SLACK: tl.constexpr,
):
    """One step of the online softmax for each tile of keys from `first`, a multiple of BLOCK_N, on.

    q: [rows, BLOCK_D]; acc: float32 [rows, BLOCK_D], sum of weight * value; top, total: float32
    [rows], a score and the sum of the weights exp2(score - top); newest: int32 [rows],
    the last key that each row sees, before `end`; with WINDOW each sees so many keys. kv_ptr: of
    the KV head; page_ids_ptr: of the row. Where not MASKED, all rows see all keys. Where MASKED,
    keys from `end` on are not read, and with WINDOW none before `begin`: there may be no page.
    scale, soft_cap: of `score_scales`. With REST a value is the first HEAD_DIM numbers of its key,
    and q_rest, [rows, BLOCK_REST], meets the other REST.

    A top follows the row's largest score once some row's exceeds its own by more than SLACK, at
    most 15, so that a weight fits float16. Until then what has been summed is not scaled, which is
    most of the arithmetic on acc; finding out takes two barriers, which few rows are not worth.
    """
    tl.static_assert(SLACK <= 15)
    dims = tl.arange(0, BLOCK_D)
    # Read a tile ahead: a load that waits for another of its own tile is pipelined half as deep.
    pages = _load_pages(page_ids_ptr, first, begin, end, PAGE_SIZE, BLOCK_N, WINDOW)
    for start in range(first, last, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        live = tokens < end
        if WINDOW:
            live = live & (tokens >= begin)
        offsets = pages.to(tl.int64) * PAGE_STRIDE + tokens % PAGE_SIZE * TOKEN_STRIDE
        pages = _load_pages(page_ids_ptr, start + BLOCK_N, begin, end, PAGE_SIZE, BLOCK_N, WINDOW)
        k_ptr = kv_ptr + offsets[:, None] + dims[None, :]
        k = _load_tile(k_ptr, live, dims, HEAD_DIM, BLOCK_D, MASKED)
        if REST:
            others = tl.arange(0, BLOCK_REST)
            rest_ptr = kv_ptr + HEAD_DIM + offsets[:, None] + others[None, :]
            k_rest = _load_tile(rest_ptr, live, others, REST, BLOCK_REST, MASKED)
            v = k
        else:
            v = _load_tile(k_ptr + V_STRIDE, live, dims, HEAD_DIM, BLOCK_D, MASKED)
        k, v = k.to(q.dtype), v.to(q.dtype)  # of what is kept in fewer bits
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if REST:
            scores = tl.dot(q_rest, tl.trans(k_rest.to(q.dtype)), scores, input_precision="ieee")
        if SOFT_CAP:
            scores = _capped(scores, scale, soft_cap)
            unit = 1.0
        else:
            unit = scale  # with the largest score alone, and within the subtraction below
        if MASKED:
            visible = tokens[None, :] <= newest[:, None]
            if WINDOW:
                visible = visible & (tokens[None, :] > newest[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        peaks = tl.max(scores, 1) * unit
        if SLACK:
            if tl.max((peaks > top + SLACK).to(tl.int32)) > 0:
                acc, top, total = _raised(acc, top, total, peaks, MASKED)
        else:
            acc, top, total = _raised(acc, top, total, peaks, MASKED)
        weights = tl.exp2(scores * unit - _finite(top, MASKED)[:, None])
        total += tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return acc, top, total


@triton.jit
def _raised(acc, top, total, peaks, MASKED: tl.constexpr):
    """The same sums, of weights by a top that is no less than the peaks."""
    new_top = tl.maximum(top, peaks)
    fade = tl.exp2(top - _finite(new_top, MASKED))
    return acc * fade[:, None], new_top, total * fade


@triton.jit
def _finite(top, MASKED: tl.constexpr):
    """Of a row that has seen nothing yet: -inf - -inf would be NaN."""
    return tl.where(top == float("-inf"), 0.0, top) if MASKED else top


@triton.jit
def _load_pages(
    page_ids_ptr,
    start,
    begin,
    end,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """The page of each token of a tile, or of all. Past the end there may be no entries, and none
    before what a window sees."""
    if PAGE_SIZE >= BLOCK_N:
        return tl.load(page_ids_ptr + start // PAGE_SIZE, mask=start < end, other=0)
    else:
        tokens = start + tl.arange(0, BLOCK_N)
        live = tokens < end
        if WINDOW:
            live = live & (tokens >= begin)
        return tl.load(page_ids_ptr + tokens // PAGE_SIZE, mask=live, other=0)


@triton.jit
def _load_tile(
    ptr, live, dims, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr
):
    """Zeros for what is not live: 0 * NaN is NaN, so weights of 0 do not keep stale values out."""
    if MASKED:
        if HEAD_DIM < BLOCK_D:
            return tl.load(ptr, mask=live[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        else:
            return tl.load(ptr, mask=live[:, None], other=0.0)
    elif HEAD_DIM < BLOCK_D:
        return tl.load(ptr, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    else:
        return tl.load(ptr)


@triton.jit
def _capped(scores, scale, soft_cap):
    """soft_cap * tanh(x), as 1 - 2 / (e^2x + 1)."""
    return soft_cap * (1.0 - 2.0 / (tl.exp2(scores * scale) + 1.0))
