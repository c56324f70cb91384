"""The short causal convolution before linear attention: over each channel's last inputs, then SiLU.

The state of a request is its last inputs, by key head. A head's cell has the channels of its q, k
and v.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels import device
from kernels.bound import bound
from kernels.linear_attention.state_cells import CellView, StateRows, addresses, token_by_token
from kernels.row_search import SEARCH_BLOCK, last_at_most

TILE_TOKENS = 64  # tokens of a program
BLOCK_TOKENS = 16  # tokens of a tile at once
BLOCK_CHANNELS = 64


def causal_conv(
    x: Tensor, columns: Tensor, weight: Tensor, cells: CellView, rows: StateRows
) -> Tensor:
    """Return the SiLU of the sum of a channel's last `width` inputs, each times its weight.

    Args:
        x: [num_tokens, any], columns contiguous, tokens may be strided.
        columns: int32 [heads, channels], columns of x with the inputs of each channel.
        weight: contiguous [heads, channels, width] of x's dtype, the newest input's weight last.
        cells: previous inputs, [channels, width - 1] of x's dtype, read and written as `rows`
            specifies.
    Returns:
        [num_tokens, heads, channels] of x's dtype, contiguous.
    Raises:
        ValueError: wrong shapes, strides or dtypes.
    """
    rows.check()
    if columns.shape != weight.shape[:2] or columns.dtype != torch.int32 or x.stride(1) != 1:
        raise ValueError(
            f"columns {columns.dtype} {tuple(columns.shape)} do not fit weight "
            f"{tuple(weight.shape)}, or x is not contiguous"
        )
    heads, channels, width = weight.shape
    if cells.view.shape[2:] != (channels, width - 1) or cells.heads != heads:
        raise ValueError(f"cells {tuple(cells.view.shape)} do not fit weight {tuple(weight.shape)}")
    if {cells.view.dtype, weight.dtype} != {x.dtype} or not weight.is_contiguous():
        raise ValueError(f"cells and weight: {x.dtype} expected, the latter contiguous")
    if device.uses_triton(x):
        return causal_conv_triton(x, columns, weight, cells, rows)
    if (compiled := device.compiled(x)) is not None:
        return compiled.causal_conv(x, columns, weight, addresses(cells, rows))
    return causal_conv_reference(x, columns, weight, cells, rows)


def causal_conv_reference(
    x: Tensor, columns: Tensor, weight: Tensor, cells: CellView, rows: StateRows
) -> Tensor:
    inputs = x[:, columns]  # [num_tokens, heads, channels]
    heads, channels, width = weight.shape
    out = torch.empty_like(inputs)
    starts, marks = rows.starts.tolist(), rows.marks.tolist()

    def one(places: Tensor, before: Tensor) -> Tensor:
        seen = torch.cat((before, inputs[places].unsqueeze(-1)), dim=3)
        out[places] = F.silu((seen * weight).sum(-1))
        return seen[..., 1:]

    for row in token_by_token(cells, rows, one):
        start, end = starts[row], starts[row + 1]
        (before,) = cells.read(rows.reads[row : row + 1])  # [heads, channels, width - 1]
        seen = torch.cat((before, inputs[start:end].permute(1, 2, 0)), dim=2)
        summed = F.conv1d(
            seen.reshape(1, heads * channels, -1),
            weight.view(heads * channels, 1, width),
            groups=heads * channels,
        )
        out[start:end] = F.silu(summed).view(heads, channels, -1).permute(2, 0, 1)
        kept = [(marks[row], rows.kept)] if marks[row] else []
        for past, pages in (*kept, (end - start, rows.writes)):
            state = seen[:, :, past : past + width - 1]
            cells.write(pages[row : row + 1], state.unsqueeze(0))
    return out


def causal_conv_triton(
    x: Tensor, columns: Tensor, weight: Tensor, cells: CellView, rows: StateRows
) -> Tensor:
    heads, channels, width = weight.shape
    out = torch.empty(len(x), heads, channels, dtype=x.dtype, device=x.device)
    if len(x):
        block = min(BLOCK_CHANNELS, triton.next_power_of_2(channels))
        searched = rows.num_decodes < rows.num_rows
        # Each row's last tile may be partial.
        num_tiles = rows.num_rows + (len(x) // TILE_TOKENS if searched else 0)
        _causal_conv_kernel[(num_tiles, heads, triton.cdiv(channels, block))](
            x,
            columns,
            weight,
            cells.view,
            out,
            rows.starts,
            rows.reads,
            rows.writes,
            rows.marks,
            rows.kept,
            rows.num_rows,
            x.stride(0),
            cells.view.stride(0),
            cells.view.stride(1),
            rows.reads.shape[1],
            cells.first_page,
            cells.first,
            STEP=cells.step,
            PER_PAGE=cells.view.shape[1],
            HEADS=heads,
            CHANNELS=channels,
            WIDTH=width,
            TILE=TILE_TOKENS,
            SEARCHED=searched,
            SEARCH_BLOCK=SEARCH_BLOCK,
            BLOCK_BEFORE=triton.next_power_of_2(width - 1),
            BLOCK_TOKENS=BLOCK_TOKENS,
            BLOCK=block,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return out


@bound
@triton.jit(
    do_not_specialize=[
        *("starts_ptr", "reads_ptr", "writes_ptr", "marks_ptr", "kept_ptr"),
        *("num_rows", "state_pages", "first_page", "first"),
    ]
)
def _causal_conv_kernel(
    x_ptr,
    columns_ptr,
    weight_ptr,
    cells_ptr,
    out_ptr,
    starts_ptr,
    reads_ptr,
    writes_ptr,
    marks_ptr,
    kept_ptr,
    num_rows,
    x_stride,
    page_stride,
    place_stride,
    state_pages,
    first_page,
    first,
    STEP: tl.constexpr,
    PER_PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    SEARCHED: tl.constexpr,
    SEARCH_BLOCK: tl.constexpr,
    BLOCK_BEFORE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Process a tile of a row's tokens, for one head and block of channels.

    Row r's tiles are numbered from starts[r] // TILE + r, which leaves room for one partial tile
    per row. Surplus numbers have no tokens. A row's first tile alone reads the old state and writes
    the new one, and does all its reads before any write.

    Args:
        SEARCHED: False if every row has one token.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    if SEARCHED:
        row = last_at_most(starts_ptr, num_rows, row, TILE, 1, SEARCH_BLOCK)
    col = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)[None, :]
    own = col < CHANNELS
    start, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    first_token, last_token = 0, end - start
    if SEARCHED:
        first_token = (tl.program_id(0) - start // TILE - row) * TILE
        if (first_token > 0) & (first_token >= last_token):
            return
        last_token = tl.minimum(last_token, first_token + TILE)
    cell = first + head * STEP
    place = row * state_pages + first_page + cell // PER_PAGE
    cells_ptr += (cell % PER_PAGE) * place_stride + col * (WIDTH - 1)
    read = tl.load(reads_ptr + place).to(tl.int64)
    before_ptr = cells_ptr + read * page_stride
    known = col < tl.where(read < 0, 0, CHANNELS)
    x_ptr += start.to(tl.int64) * x_stride
    x_ptr += tl.load(columns_ptr + head * CHANNELS + col, mask=own, other=0)
    weight_ptr += (head * CHANNELS + col) * WIDTH
    out_ptr += (start.to(tl.int64) * HEADS + head) * CHANNELS + col
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    for done in range(first_token, last_token, BLOCK_TOKENS):
        token = done + tl.arange(0, BLOCK_TOKENS)[:, None]
        there = own & (token < end - start)
        total = tl.zeros([BLOCK_TOKENS, BLOCK], tl.float32)
        for tap in tl.static_range(WIDTH):
            at = token + (tap - (WIDTH - 1))
            seen = _input(x_ptr, x_stride, before_ptr, at, there, there & known, WIDTH)
            total += seen.to(tl.float32) * tl.load(weight_ptr + tap, mask=own, other=0.0)
        total = total.to(dtype).to(tl.float32)
        y = total / (1.0 + tl.exp(-total))
        tl.store(out_ptr + token.to(tl.int64) * (HEADS * CHANNELS), y.to(dtype), mask=there)
    if first_token > 0:
        return
    tap = tl.arange(0, BLOCK_BEFORE)[:, None]
    mark, keep = tl.load(marks_ptr + row), tl.load(kept_ptr + place).to(tl.int64)
    inner = own & (tap < WIDTH - 1)
    last = end - start - (WIDTH - 1) + tap
    after = _input(x_ptr, x_stride, before_ptr, last, inner, inner & known, WIDTH)
    marked = own & (tap < tl.where((mark > 0) & (keep >= 0), WIDTH - 1, 0))
    on_way = mark - (WIDTH - 1) + tap
    between = _input(x_ptr, x_stride, before_ptr, on_way, marked, marked & known, WIDTH)
    tl.debug_barrier()
    write = tl.load(writes_ptr + place).to(tl.int64)
    inner &= tap < tl.where(write < 0, 0, WIDTH)
    tl.store(cells_ptr + write * page_stride + tap, after, mask=inner)
    tl.store(cells_ptr + keep * page_stride + tap, between, mask=marked)


@triton.jit
def _input(x_ptr, x_stride, before_ptr, at, there, known, WIDTH: tl.constexpr):
    """Return a channel's input at token `at` of the row. Before the row's start it comes from the
    state, or is 0."""
    x = tl.load(x_ptr + at.to(tl.int64) * x_stride, mask=there & (at >= 0), other=0.0)
    early = tl.load(before_ptr + (at + WIDTH - 1), mask=known & (at < 0), other=0.0)
    return tl.where(at < 0, early, x)
