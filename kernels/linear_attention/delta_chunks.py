"""The gated delta rule in Triton for prompts, a chunk of tokens at a time (WY form).

Within a chunk, with decays d[i] = exp(g[0] + ... + g[i]) and a state S before it, the learnt values
u solve a unit triangular system:

    u[i] + beta[i] sum_{j < i} d[i] / d[j] (k[i] k[j]) u[j] = beta[i] (v[i] - d[i] k[i] S)

The outputs and the next state are products with u. Keys and queries enter these products without
normalisation, and the inverses of their lengths scale the results, which avoids a rounding.

Source: Gated Delta Networks, Yang et al. 2024, section 3.3.
"""

import triton
import triton.language as tl

from kernels.bound import bound

# Tokens of a chunk, a power of two, at least 16. Larger chunks need as many instructions per token,
# because their triangular systems grow, and spill registers.
CHUNK = 16
STAGES = 2  # of the pipeline that loads chunks
LOG2_E = tl.constexpr(1.4426950408889634)


def num_warps(architecture: int) -> int:
    """Return the warps of a program. On sm_120, 4 would spill registers.

    Args:
        architecture: 90 for compute capability 9.0. Data center GPUs since then multiply operands
            in shared memory, others need registers for them.
    """
    return 4 if architecture // 10 in (9, 10) else 8


@bound
@triton.jit(
    do_not_specialize=[
        *("a_ptr", "b_ptr", "cells_ptr", "starts_ptr", "reads_ptr", "writes_ptr", "marks_ptr"),
        *("kept_ptr", "a_stride", "a_head", "b_stride", "b_head"),
        *("state_pages", "first_page", "first"),
    ]
)
def delta_chunks_kernel(
    x_ptr,
    a_ptr,
    b_ptr,
    a_log_ptr,
    dt_bias_ptr,
    cells_ptr,
    out_ptr,
    starts_ptr,
    reads_ptr,
    writes_ptr,
    marks_ptr,
    kept_ptr,
    a_stride,
    a_head,
    b_stride,
    b_head,
    page_stride,
    place_stride,
    state_pages,
    first_page,
    first,
    scale,
    eps,
    STEP: tl.constexpr,
    PER_PAGE: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Process one row, value head and block of a matrix's columns, which stays in registers.

    A mark ends a chunk. The first rows have the most tokens and start first.
    """
    head, row = tl.program_id(1), tl.program_id(2)
    key_head = head // GROUP
    dtype: tl.constexpr = tl.float32 if UPCAST else out_ptr.dtype.element_ty
    i, j = tl.arange(0, BLOCK_K), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, CHUNK)
    cell = first + head * STEP
    place = row * state_pages + first_page + cell // PER_PAGE
    cells_ptr += cell % PER_PAGE * place_stride
    page = tl.load(reads_ptr + place).to(tl.int64)
    cells, own = _cells(cells_ptr, page, page_stride, i, j, K, V)
    state = tl.load(cells, mask=own, other=0.0)
    start = tl.load(starts_ptr + row)
    count = tl.load(starts_ptr + row + 1) - start
    mark = tl.load(marks_ptr + row)
    speed = -tl.exp(tl.load(a_log_ptr + head)) * LOG2_E
    bias = tl.load(dt_bias_ptr + head)
    a_ptr += key_head * a_head + head % GROUP
    b_ptr += key_head * b_head + head % GROUP
    channels: tl.constexpr = 2 * K + GROUP * V
    for part in range(2):  # up to the mark, then to the row's end
        begin = start + tl.where(part == 0, 0, mark)
        end = start + tl.where(part == 0, mark, count)
        for chunk in range(tl.cdiv(end - begin, CHUNK)):
            # Positions in the part, not in the chunk, so that the masks of pairs are computed again
            # for each chunk. Masks kept in registers would spill other values.
            token = chunk * CHUNK + lane
            live = begin + token < end
            at = (begin + token).to(tl.int64)
            x = x_ptr + ((at * KEY_HEADS + key_head) * channels)[:, None]
            inside = live[:, None] & (i < K)[None, :]
            q = tl.load(x + i[None, :], mask=inside, other=0.0).to(dtype)
            k = tl.load(x + K + i[None, :], mask=inside, other=0.0).to(dtype)
            of_value = live[:, None] & (j < V)[None, :]
            v_ptr = x + 2 * K + head % GROUP * V + j[None, :]
            v = tl.load(v_ptr, mask=of_value, other=0.0).to(tl.float32)
            a = tl.load(a_ptr + at * a_stride, mask=live, other=0.0).to(tl.float32) + bias
            b = tl.load(b_ptr + at * b_stride, mask=live, other=0.0).to(tl.float32)
            # softplus, linear like torch's where exp would be large
            g = speed * tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
            g = tl.where(live, g, 0.0)
            beta = tl.where(live, 1.0 / (1.0 + tl.exp(-b)), 0.0)
            passed, whole = tl.cumsum(g, 0), tl.sum(g, 0)
            q_scale = tl.rsqrt(tl.sum(q.to(tl.float32) * q, 1) + eps) * scale
            k_scale = tl.rsqrt(tl.sum(k.to(tl.float32) * k, 1) + eps)
            held = tl.trans(k)
            seen = token[:, None] >= token[None, :]
            fade = tl.exp2(tl.where(seen, passed[:, None] - passed[None, :], float("-inf")))
            fade *= k_scale[None, :]
            within = tl.dot(q, held, input_precision="ieee") * fade * q_scale[:, None]
            within = within.to(dtype)
            system = tl.dot(k, held, input_precision="ieee") * fade * (beta * k_scale)[:, None]
            inverse = _inverse(system, token, CHUNK, UPCAST).to(dtype)
            decay = tl.exp2(passed)
            narrow = state.to(dtype)
            known = tl.dot(k, narrow, input_precision="ieee") * (k_scale * decay)[:, None]
            wanted = ((v - known) * beta[:, None]).to(dtype)
            learnt = tl.dot(inverse, wanted, input_precision="ieee")
            y = tl.dot(q, narrow, input_precision="ieee") * (q_scale * decay)[:, None]
            y = tl.dot(within, learnt.to(dtype), y, input_precision="ieee")
            out = out_ptr + ((at * (KEY_HEADS * GROUP) + head) * V)[:, None] + j[None, :]
            tl.store(out, y.to(out_ptr.dtype.element_ty), mask=of_value)
            lasting = (learnt * (k_scale * tl.exp2(whole - passed))[:, None]).to(dtype)
            state = tl.dot(held, lasting, state * tl.exp2(whole), input_precision="ieee")
        page = tl.load(tl.where(part == 0, kept_ptr, writes_ptr) + place).to(tl.int64)
        page = tl.where((part == 0) & (mark == 0), -1, page)
        cells, own = _cells(cells_ptr, page, page_stride, i, j, K, V)
        tl.store(cells, state, mask=own)


@triton.jit
def _cells(cells_ptr, page, page_stride, i, j, K: tl.constexpr, V: tl.constexpr):
    """Return the addresses of a matrix in a page, and a mask that is empty if there is no page.

    The row numbers include the page. Otherwise addresses would stay in registers between the read
    and the write of the state, and other values would be spilled.
    """
    row = (i + page)[:, None]
    own = (i < tl.where(page < 0, 0, K))[:, None] & (j < V)[None, :]
    return cells_ptr + page * (page_stride - V) + row * V + j[None, :], own


@triton.jit
def _inverse(system, token, SIZE: tl.constexpr, UPCAST: tl.constexpr):
    """Return the inverse of I + a, where a is the part of `system` below the diagonal.

    Inverts blocks of 2, 4, 8, ... on the diagonal. The part of a block below its halves A and B is
    -B^-1 a A^-1. Unlike in a sum of powers of a, every intermediate result is a part of the
    inverse, which is small even if keys are equal.

    Args:
        system: float32 [SIZE, SIZE].
        token: [SIZE], SIZE consecutive numbers from a multiple of SIZE on.
    """
    # The highest bit is the level at which a pair of tokens is in one block.
    apart = tl.where(token[:, None] > token[None, :], token[:, None] ^ token[None, :], 0)
    inverse = tl.where(token[:, None] == token[None, :], 1.0, 0.0)
    inverse -= tl.where(apart == 1, system, 0.0)
    # No number exceeds 1 by more than rounding, so float16 is as exact as tf32.
    dtype: tl.constexpr = tl.float32 if UPCAST else tl.float16
    for level in tl.static_range(1, 6):
        if 2 << level <= SIZE:
            half = inverse.to(dtype)
            across = tl.where(apart >> level == 1, system, 0.0).to(dtype)
            product = tl.dot(across, half, input_precision="ieee").to(dtype)
            inverse -= tl.dot(half, product, input_precision="ieee")
    return inverse
