"""The loop over tiles of keys (online softmax), shared by the Triton attention kernels.

Scores are base-2 logarithms: their scale includes log2(e), so that exp2 can be used.
"""

import math

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from kernels import device

LOG2_E = tl.constexpr(math.log2(math.e))
OLDER_TRITON = tl.constexpr(device.OLDER_TRITON)


def score_scales(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """Return the arguments `scale` and `soft_cap` of `attend_tiles`."""
    if soft_cap is None:
        return scale * LOG2_E.value, 0.0
    return 2 * LOG2_E.value * scale / soft_cap, LOG2_E.value * soft_cap


def block(head_dim: int) -> int:
    """Return the block size for `head_dim` numbers: a power of two that tl.dot accepts."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def stages_that_fit(
    wanted: int,
    *,
    rows: int,
    keys: int,
    head_dim: int,
    rest: int,
    apart: bool,
    kept: int,
    computed: int,
) -> int:
    """Return how many stages of the load pipeline fit in the device's shared memory.

    One tile fewer than there are stages is in flight. Shared memory also holds the queries, the
    weights and a widened tile, as operands of a product.

    Args:
        wanted: useful number of stages, at least 1.
        rows: queries in a program, times heads.
        keys: keys of a tile.
        head_dim: numbers of a value.
        rest: further numbers of a key.
        apart: False if a value is part of its key.
        kept: bytes of a stored number.
        computed: bytes of a number in a product.
    """
    key = block(head_dim) + (block(rest) if rest else 0)
    numbers = keys * (key + block(head_dim) if apart else key)
    beside = rows * (key + keys) * computed
    if kept < computed:
        beside += numbers * computed
    return max(1, min(wanted, 1 + (device.shared_bytes() - beside) // (numbers * kept)))


@triton.jit
def as_operand(q, kv_ptr, HALF: tl.constexpr, UPCAST: tl.constexpr):
    """Return queries in the dtype of their products.

    With HALF, bfloat16 queries become float16 if keys have 8 bits, because one instruction converts
    two 8-bit floats to float16, exactly.
    """
    if UPCAST:
        q = q.to(tl.float32)
    elif HALF & (kv_ptr.dtype.element_ty.primitive_bitwidth == 8) & (q.dtype == tl.bfloat16):
        most: tl.constexpr = 65504.0
        wide = tl.clamp(q.to(tl.float32), -most, most, propagate_nan=tl.PropagateNan.ALL)
        q = wide.to(tl.float16)
    return q


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
    """Run one step of the online softmax for each tile of keys from `first` (a multiple of BLOCK_N)
    on.

    `top` follows the row's largest score only when some row's exceeds its `top` by more than SLACK
    (at most 15, so that a weight fits float16). Until then the sums are not rescaled, which saves
    most of the arithmetic on acc. The check costs two barriers, too much for few rows.

    Args:
        q: [rows, BLOCK_D].
        q_rest: [rows, BLOCK_REST], for the REST numbers of a key after the first HEAD_DIM.
        acc: float32 [rows, BLOCK_D], sum of weight * value.
        top, total: float32 [rows], a score, and the sum of the weights exp2(score - top).
        newest: int32 [rows], the last key that each row sees, before `end`. With WINDOW, each row
            sees WINDOW keys.
        kv_ptr: of the KV head.
        page_ids_ptr: of the row.
        V_STRIDE: distance from a key to its value. 0: a value is the first HEAD_DIM numbers of its
            key.
        scale, soft_cap: from `score_scales`.
        MASKED: False: all rows see all keys. True: keys from `end` on are not read, and with WINDOW
            none before `begin`, because their pages may not exist.
    Returns:
        acc, top, total.
    """
    tl.static_assert(SLACK <= 15)
    # Many heads on latents need registers. So page ids are loaded once per page, and addresses that
    # do not change between tiles are not kept.
    WIDE: tl.constexpr = V_STRIDE == 0 and q.shape[0] >= 64
    BY_PAGE: tl.constexpr = WIDE and PAGE_SIZE < BLOCK_N
    STRIDES: tl.constexpr = PAGE_STRIDE | TOKEN_STRIDE | 16
    # Before Triton 3.9, prompts with wide heads, or with a few pages per tile, need them too.
    CROWDED: tl.constexpr = BLOCK_D > 128 or (PAGE_SIZE > 16 and PAGE_SIZE < BLOCK_N)
    FEW_REGISTERS: tl.constexpr = WIDE or (OLDER_TRITON and q.shape[0] >= 128 and CROWDED)
    dims = tl.arange(0, BLOCK_D)
    # Page ids are loaded one tile ahead: a load that depends on another load of its own tile is
    # pipelined half as deep.
    pages = _load_pages(page_ids_ptr, first, begin, end, PAGE_SIZE, BLOCK_N, WINDOW, BY_PAGE)
    for start in tl.range(first, last, BLOCK_N, disable_licm=FEW_REGISTERS):
        tokens = start + tl.arange(0, BLOCK_N)
        live = tokens < end
        if WINDOW:
            live = live & (tokens >= begin)
        if BY_PAGE:
            places = tl.arange(0, PAGE_SIZE) * TOKEN_STRIDE
            offsets = (pages.to(tl.int64) * PAGE_STRIDE)[:, None] + places[None, :]
            # Triton 3.7 loses the alignment in a reshape, and would load two bytes at a time.
            offsets = tl.multiple_of(tl.reshape(offsets, [BLOCK_N]), [STRIDES & -STRIDES])
        else:
            offsets = pages.to(tl.int64) * PAGE_STRIDE + tokens % PAGE_SIZE * TOKEN_STRIDE
        following = start + BLOCK_N
        pages = _load_pages(
            page_ids_ptr, following, begin, end, PAGE_SIZE, BLOCK_N, WINDOW, BY_PAGE
        )
        k_ptr = kv_ptr + offsets[:, None] + dims[None, :]
        k = _load_tile(k_ptr, live, dims, HEAD_DIM, BLOCK_D, MASKED)
        if REST:
            others = tl.arange(0, BLOCK_REST)
            rest_ptr = kv_ptr + HEAD_DIM + offsets[:, None] + others[None, :]
            k_rest = _load_tile(rest_ptr, live, others, REST, BLOCK_REST, MASKED)
        if V_STRIDE:
            v = _load_tile(k_ptr + V_STRIDE, live, dims, HEAD_DIM, BLOCK_D, MASKED)
        else:
            k = _widened(k, q.dtype, q.shape[0])
            v = k
        k, v = k.to(q.dtype), _widened(v, q.dtype, q.shape[0])
        if WIDE:
            # Both conditions are always true. Without them, Triton sees that another product
            # follows, and computes all scores in each group of four warps. Without the
            # `else`, Triton 3.7 exchanges scores between warps instead of weights, see `_rounded`.
            scores = tl.zeros([q.shape[0], BLOCK_N], tl.float32)
            if start < last:
                scores = tl.dot(q, tl.trans(k), scores, input_precision="ieee")
            k_rest = tl.trans(k_rest.to(q.dtype))
            if first < last:
                scores = tl.dot(q_rest, k_rest, scores, input_precision="ieee")
            else:
                scores = tl.dot(q_rest, k_rest, input_precision="ieee")
        else:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            if REST:
                k_rest = tl.trans(k_rest.to(q.dtype))
                scores = tl.dot(q_rest, k_rest, scores, input_precision="ieee")
        if SOFT_CAP:
            scores = _capped(scores, scale, soft_cap)
            unit = 1.0
        else:
            unit = scale  # applied only to the largest score, and within the subtraction below
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
        weights = tl.exp2(scores * unit - (finite(top) if MASKED else top)[:, None])
        total += tl.sum(weights, 1)
        acc = tl.dot(_rounded(weights, v.dtype, WIDE), v, acc, input_precision="ieee")
    return acc, top, total


@triton.jit
def _rounded(weights, dtype: tl.constexpr, WIDE: tl.constexpr):
    """Return weights in the dtype of a product.

    With WIDE, the inline assembly has side effects, so the compiler exchanges the weights between
    warps only after it. Otherwise it would exchange the longer scores and compute all weights
    twice.
    """
    rounded = weights.to(dtype)
    if WIDE and rounded.dtype.primitive_bitwidth == 16:
        rounded = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [rounded], dtype=rounded.dtype, is_pure=False, pack=2
        )
    return rounded


@triton.jit
def as_part(acc, top, total):
    """Return a part of a row's keys in the form of `joined`: the sums divided by the sum of their
    weights, and the logarithm of that sum."""
    total = tl.where(total == 0.0, 1.0, total)  # a lane that sees no key
    return acc / total[:, None], top + tl.log2(total)


@triton.jit
def joined(acc, top, total, parts, logs):
    """Add parts [parts, rows, BLOCK_D] with logs [parts, rows] to the sums of earlier keys."""
    new_top = tl.maximum(top, tl.max(logs, 0))
    shown = finite(new_top)  # a lane may see no key of the parts so far
    weights = tl.exp2(logs - shown[None, :])
    fade = tl.exp2(top - shown)
    # Explicit, because the compiler might contract different products in different callers.
    acc = tl.fma(acc, fade[:, None], tl.sum(weights[:, :, None] * parts, 0))
    return acc, new_top, tl.fma(total, fade, tl.sum(weights, 0))


@triton.jit
def _raised(acc, top, total, peaks, MASKED: tl.constexpr):
    """Rescale the sums so that `top` is at least `peaks`."""
    new_top = tl.maximum(top, peaks)
    fade = tl.exp2(top - (finite(new_top) if MASKED else new_top))
    return acc * fade[:, None], new_top, total * fade


@triton.jit
def gated(acc, gate_ptr, inside, out_ptr):
    """Return acc, rounded to the output's dtype, times the sigmoid of the gate, in float32."""
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    return acc.to(out_ptr.dtype.element_ty).to(tl.float32) * tl.sigmoid(gate)


@triton.jit
def finite(top):
    """Return 0 for a row that has seen no key, because -inf - -inf would be NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _load_pages(
    page_ids_ptr,
    start,
    begin,
    end,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    BY_PAGE: tl.constexpr,
):
    """Load the page of each token of a tile: per token, once per page, or one page for all. Entries
    may be missing after the end and before the window."""
    if PAGE_SIZE >= BLOCK_N:
        return tl.load(page_ids_ptr + start // PAGE_SIZE, mask=start < end, other=0)
    elif BY_PAGE:
        tl.static_assert(not WINDOW)
        tokens = start + tl.arange(0, BLOCK_N // PAGE_SIZE) * PAGE_SIZE
        return tl.load(page_ids_ptr + tokens // PAGE_SIZE, mask=tokens < end, other=0)
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
    """Load a tile, with zeros for keys that are not live, because 0 * NaN is NaN."""
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
def _widened(x, wanted: tl.constexpr, ROWS: tl.constexpr):
    """Return stored numbers, which may have fewer bits, in the dtype of a product with ROWS rows.

    Pairs of 8-bit floats become float16 before the operand is formed. Otherwise the compiler would
    read the transposed operand byte by byte. It does not move operations with side effects.
    Products in tensor memory have operands in shared memory and do not need this. Triton 3.7 cannot
    pipeline operations with side effects.
    """
    if (x.dtype.primitive_bitwidth == 8) & (wanted == tl.float16):
        DATA_CENTER: tl.constexpr = cuda_capability_geq(10) and not cuda_capability_geq(12)
        TENSOR_MEMORY: tl.constexpr = DATA_CENTER and ROWS >= 64
        FORMAT: tl.constexpr = "e4m3x2" if x.dtype == tl.float8e4nv else "e5m2x2"
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; mov.b32 {low, high}, $2;"
            + " cvt.rn.f16x2."
            + FORMAT
            + " $0, low; cvt.rn.f16x2."
            + FORMAT
            + " $1, high; }",
            "=r,=r,r",
            [x],
            dtype=tl.float16,
            is_pure=TENSOR_MEMORY,
            pack=4,
        )
    else:
        return x.to(wanted)


@triton.jit
def _capped(scores, scale, soft_cap):
    """Return soft_cap * tanh(x), computed as 1 - 2 / (e^2x + 1)."""
    return soft_cap * (1.0 - 2.0 / (tl.exp2(scores * scale) + 1.0))
