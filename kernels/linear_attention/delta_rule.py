"""The gated delta rule: one matrix per head, which decays with every token and learns the token's
value for its key.

    S <- exp(g) S;   S <- S + k (beta (v - k S));   o = q S

Computed in float32. Keys and queries have length 1, and queries are divided by the root of their
size.
Source: Gated Delta Networks, Yang et al. 2024.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels import device
from kernels.bound import bound
from kernels.linear_attention import delta_chunks
from kernels.linear_attention.state_cells import CellView, StateRows, addresses, token_by_token

CHUNK = 64  # tokens that the reference processes together
BLOCK_V = 32  # columns of a head's matrix that a program keeps in registers
_EPS = 1e-6  # added to a squared length


class Gates(NamedTuple):
    """Per-head gates: g = -exp(a_log) softplus(a + dt_bias), beta = sigmoid(b).

    Attributes:
        a, b: [num_tokens, key_heads, any] with a key head's value heads, columns contiguous, of x's
            dtype.
        a_log, dt_bias: contiguous float32 [value_heads].
    """

    a: Tensor
    b: Tensor
    a_log: Tensor
    dt_bias: Tensor


def delta_rule(x: Tensor, gates: Gates, cells: CellView, rows: StateRows) -> Tensor:
    """Apply the rule to the rows' tokens. `rows` names the states to read and to write.

    Args:
        x: contiguous [num_tokens, key_heads, channels] from `causal_conv`: for each key head its q,
            its k and the values of its value heads.
        cells: float32 matrices [size of a key, size of a value], one for each value head.
    Returns:
        [num_tokens, value_heads, size of a value], of x's dtype.
    Raises:
        ValueError: wrong shapes, strides or dtypes.
    """
    rows.check()
    num_tokens, key_heads, channels = x.shape
    k_size, v_size = cells.view.shape[2:]
    group = cells.heads // key_heads
    if cells.heads % key_heads or channels != 2 * k_size + group * v_size:
        raise ValueError(
            f"x {tuple(x.shape)} does not fit {cells.heads} matrices of [{k_size}, {v_size}]"
        )
    if cells.view.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(
            f"float32 states and a contiguous x expected, not {cells.view.dtype}, {x.stride()}"
        )
    for gate in (gates.a, gates.b):
        fits = gate.shape == (num_tokens, key_heads, group) and gate.dtype == x.dtype
        if not fits or gate.stride(2) != 1:
            raise ValueError(
                f"gates {gate.dtype} {tuple(gate.shape)} do not fit x {x.dtype} {tuple(x.shape)}"
            )
    for each in (gates.a_log, gates.dt_bias):
        if each.shape != (cells.heads,) or each.dtype != torch.float32:
            raise ValueError(f"a_log, dt_bias: float32 [{cells.heads}] expected")
    if device.uses_triton(x):
        return delta_rule_triton(x, gates, cells, rows)
    if (compiled := device.compiled(x)) is not None:
        return compiled.delta_rule(x, gates, addresses(cells, rows), (k_size, v_size), _EPS)
    return delta_rule_reference(x, gates, cells, rows)


def delta_rule_reference(x: Tensor, gates: Gates, cells: CellView, rows: StateRows) -> Tensor:
    """Compute long rows in chunks, and all rows of few tokens together, token by token."""
    k_size, v_size = cells.view.shape[2:]
    group = cells.heads // x.shape[1]
    wide = x.float()
    q, k, v = wide[..., :k_size], wide[..., k_size : 2 * k_size], wide[..., 2 * k_size :]
    q = (_of_length_one(q) * k_size**-0.5).repeat_interleave(group, dim=1)
    k = _of_length_one(k).repeat_interleave(group, dim=1)
    v = v.reshape(len(x), cells.heads, v_size)
    g = -gates.a_log.exp() * F.softplus(gates.a.flatten(1).float() + gates.dt_bias)
    beta = torch.sigmoid(gates.b.flatten(1).float())
    out = torch.empty_like(v)
    starts, marks = rows.starts.tolist(), rows.marks.tolist()

    def one(places: Tensor, state: Tensor) -> Tensor:
        y = _one_token(q[places], k[places], v[places], g[places], beta[places], state)
        out[places] = y.view(len(places), *out.shape[1:])
        return state

    for row in token_by_token(cells, rows, one):
        start, end = starts[row], starts[row + 1]
        (state,) = cells.read(rows.reads[row : row + 1])
        stops = [(start + marks[row], rows.kept)] if marks[row] else []
        for stop, pages in (*stops, (end, rows.writes)):
            of_these = [each[start:stop].transpose(0, 1) for each in (q, k, v, g, beta)]
            if stop > start:  # a mark may be at the row's end
                y, state = _chunks(state, *of_these)
                out[start:stop] = y.transpose(0, 1)
            cells.write(pages[row : row + 1], state.unsqueeze(0))
            start = stop
    return out.to(x.dtype)


def _of_length_one(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


def _one_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Apply the rule to one token of n rows and return the outputs.

    Args:
        q, k, v: [n, heads, any].
        g, beta: [n, heads].
        state: contiguous [n, heads, k, v]. Changed in place, because it is most of a large model's
            memory traffic.
    """
    state = state.flatten(0, 1)
    q, k, v, g, beta = (each.flatten(0, 1).unsqueeze(1) for each in (q, k, v, g, beta))
    state.mul_(g.exp().unsqueeze(2))
    learnt = (v - torch.bmm(k, state)) * beta.unsqueeze(2)
    state.baddbmm_(k.mT, learnt)
    return torch.bmm(q, state)


def _chunks(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply the rule to many tokens, CHUNK of them at a time. Within a chunk the learnt values are
    the solution of a triangular system.

    Args:
        state: [heads, k, v].
        q, k, v: [heads, n, any].
        g, beta: [heads, n].
    """
    num_tokens = q.shape[1]
    missing = -num_tokens % CHUNK
    q, k, v = (
        F.pad(each, (0, 0, 0, missing)).view(len(each), -1, CHUNK, each.shape[2])
        for each in (q, k, v)
    )
    g, beta = (F.pad(each, (0, missing)).view(len(each), -1, CHUNK) for each in (g, beta))
    passed = g.cumsum(-1)  # [heads, chunks, CHUNK]
    between = (passed[..., :, None] - passed[..., None, :]).tril().exp().tril()
    k_beta = k * beta[..., None]
    system = (k_beta @ k.mT) * between
    wanted = torch.cat((v * beta[..., None], k_beta * passed.exp()[..., None]), dim=-1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    values, keys = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    within = (q @ k.mT) * between
    from_state = q * passed.exp()[..., None]
    whole = passed[..., -1:]
    to_state = (k * (whole - passed).exp()[..., None]).mT
    outputs = []
    for chunk in range(q.shape[1]):
        learnt = values[:, chunk] - keys[:, chunk] @ state
        outputs.append(from_state[:, chunk] @ state + within[:, chunk] @ learnt)
        state = state * whole[:, chunk, :, None].exp() + to_state[:, chunk] @ learnt
    return torch.cat(outputs, dim=1)[:, :num_tokens], state


def delta_rule_triton(x: Tensor, gates: Gates, cells: CellView, rows: StateRows) -> Tensor:
    """Launch one kernel for all rows: in chunks if rows are long, else token by token. In float32
    it is always token by token, so that a prompt gives the same bits however it is cut.
    """
    num_tokens, key_heads, _ = x.shape
    k_size, v_size = cells.view.shape[2:]
    out = torch.empty(num_tokens, cells.heads, v_size, dtype=x.dtype, device=x.device)
    if num_tokens:
        on_120 = device.architecture() == 120  # where Triton 3.7 would spill registers
        block = min(BLOCK_V, triton.next_power_of_2(v_size))
        kernel: Any = _delta_rule_kernel[(rows.num_rows, cells.heads, triton.cdiv(v_size, block))]
        options: dict[str, Any] = {"num_warps": 4, "maxnreg": 128 if on_120 else None}
        if x.dtype != torch.float32 and rows.has_long_rows(num_tokens):
            block = 16 if on_120 else max(16, block)
            blocks = triton.cdiv(v_size, block)
            kernel = delta_chunks.delta_chunks_kernel[(blocks, cells.heads, rows.num_rows)]
            options = {
                "CHUNK": delta_chunks.CHUNK,
                "UPCAST": device.INTERPRETED,
                "num_warps": delta_chunks.num_warps(device.architecture()),
                "num_stages": delta_chunks.STAGES,
            }
        kernel(
            x, *gates, cells.view, out,
            rows.starts, rows.reads, rows.writes, rows.marks, rows.kept,
            gates.a.stride(0), gates.a.stride(1), gates.b.stride(0), gates.b.stride(1),
            cells.view.stride(0), cells.view.stride(1),
            rows.reads.shape[1], cells.first_page, cells.first, k_size**-0.5, _EPS,
            STEP=cells.step, PER_PAGE=cells.view.shape[1],
            KEY_HEADS=key_heads, GROUP=cells.heads // key_heads, K=k_size, V=v_size,
            BLOCK=block, BLOCK_K=max(16, triton.next_power_of_2(k_size)),
            enable_fp_fusion=True, **options,
        )  # fmt: skip
    return out


@bound
@triton.jit(
    do_not_specialize=[
        *("a_ptr", "b_ptr", "cells_ptr", "starts_ptr", "reads_ptr", "writes_ptr", "marks_ptr"),
        *("kept_ptr", "a_stride", "a_head", "b_stride", "b_head"),
        *("state_pages", "first_page", "first"),
    ]
)
def _delta_rule_kernel(
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
):
    """Process one row, value head and block of a matrix's columns.

    The block stays in registers while the row's tokens are processed one after the other. A prompt
    therefore gives the same bits however it is cut.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    key_head, in_group = head // GROUP, head % GROUP
    i = tl.arange(0, BLOCK_K)
    j = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    of_key, of_value = i < K, j < V
    cell = first + head * STEP
    page, place = first_page + cell // PER_PAGE, cell % PER_PAGE
    cells_ptr += place * place_stride
    cells_ptr += i[:, None] * V + j[None, :]
    read = tl.load(reads_ptr + row * state_pages + page).to(tl.int64)
    state = tl.load(
        cells_ptr + read * page_stride, mask=_of(i, read, K) & of_value[None, :], other=0.0
    )
    start, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    mark = tl.load(marks_ptr + row)
    marked = tl.where(mark > 0, start + mark - 1, -1)
    keep = tl.load(kept_ptr + row * state_pages + page).to(tl.int64)
    speed = -tl.exp(tl.load(a_log_ptr + head))
    bias = tl.load(dt_bias_ptr + head)
    channels: tl.constexpr = 2 * K + GROUP * V
    for token in range(start, end):
        at = tl.cast(token, tl.int64)
        x = x_ptr + (at * KEY_HEADS + key_head) * channels
        q = tl.load(x + i, mask=of_key, other=0.0).to(tl.float32)
        k = tl.load(x + K + i, mask=of_key, other=0.0).to(tl.float32)
        v = tl.load(x + 2 * K + in_group * V + j, mask=of_value, other=0.0).to(tl.float32)
        a = tl.load(a_ptr + at * a_stride + key_head * a_head + in_group).to(tl.float32) + bias
        b = tl.load(b_ptr + at * b_stride + key_head * b_head + in_group).to(tl.float32)
        # softplus, linear like torch's where exp would be large
        g = speed * tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
        q *= tl.rsqrt(tl.sum(q * q) + eps) * scale
        k *= tl.rsqrt(tl.sum(k * k) + eps)
        state *= tl.exp(g)
        learnt = (v - tl.sum(k[:, None] * state, axis=0)) / (1.0 + tl.exp(-b))
        state += k[:, None] * learnt[None, :]
        y = tl.sum(q[:, None] * state, axis=0)
        where = out_ptr + (at * (KEY_HEADS * GROUP) + head) * V + j
        tl.store(where, y.to(out_ptr.dtype.element_ty), mask=of_value)
        kept = _of(i, tl.where(token == marked, keep, -1), K) & of_value[None, :]
        tl.store(cells_ptr + keep * page_stride, state, mask=kept)
    write = tl.load(writes_ptr + row * state_pages + page).to(tl.int64)
    tl.store(cells_ptr + write * page_stride, state, mask=_of(i, write, K) & of_value[None, :])


@triton.jit
def _of(i, page, K: tl.constexpr):
    """Return a mask of the rows of a matrix in a page, which is empty if there is no page."""
    return (i < tl.where(page < 0, 0, K))[:, None]
