"""Move of early rows: rows of a step that begin earlier than scheduled, because the previous step
rejected drafts."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import device
from kernels.bound import bound

_DTYPES = [torch.int64, *[torch.int32] * 9]
_LANES = 32  # one warp. Longer rows are moved in several blocks


class EarlyRows(NamedTuple):
    """The rows of a step. All tensors are contiguous, and may have more entries than described.

    Attributes:
        most: int32 [n or more], maximum number of tokens by which each row moves back.
        guesses: int32 [n, width]. If a row has drafts, its entries are the drafts for token
            indices. They begin right after the earliest index that the row's first token may have.
            Without rows with drafts it may be empty.
        starts: int32 [n + 1], where each row's tokens start. Every row has at least one.
        slots: int64 [n].
        num_rows: int32 [1], n. It is on the device, so that graphs can have any number of rows.
    """

    most: Tensor
    guesses: Tensor
    starts: Tensor
    slots: Tensor
    num_rows: Tensor


class RowInputs(NamedTuple):
    """The inputs of a forward over these rows, as scheduled. All tensors are contiguous, and may
    have more entries than described.

    Attributes:
        token_ids: int32 [num_tokens]. In a row that moves, all tokens but the first are drafts.
        positions: int32 [num_tokens], or [any, num_tokens].
        lengths: int32 [n], index of each row's last token, plus 1.
        locations: int64 [num_tokens] for each page table: page * page_size + offset.
        page_starts: int32 [n] for each page table. Page number j of row i is page_ids[starts[i] +
            j].
        page_ids: int32 [any].
    """

    token_ids: Tensor
    positions: Tensor
    lengths: Tensor
    locations: Sequence[Tensor]
    page_starts: Sequence[Tensor]
    page_ids: Tensor


def move_early_rows(
    rows: EarlyRows, inputs: RowInputs, rejected: Tensor, sampled: Tensor, page_size: int
) -> None:
    """Move each row back by the number of rejected drafts, at most by its maximum, in place.

    Args:
        inputs: all but the pages are changed.
        rejected: int32 [any], number of rejected drafts of each slot.
        sampled: int32 [any], contiguous. Position of the token that is sampled after each token:
            first after each row's last token, then after the others, row by row. Changed, too.
    Raises:
        ValueError: wrong shapes, strides or dtypes.
    """
    tensors = (
        rows.slots,
        rows.most,
        rows.guesses,
        rows.starts,
        rows.num_rows,
        inputs.token_ids,
        inputs.positions,
        inputs.lengths,
        rejected,
        sampled,
    )
    if [each.dtype for each in tensors] != _DTYPES:
        raise ValueError("int64 slots and int32 inputs of rows expected")
    if not all(map(Tensor.is_contiguous, tensors)):
        raise ValueError("contiguous inputs of rows expected")
    most = min(len(rows.starts) - 1, len(rows.slots), len(inputs.lengths))
    if len(rows.most) > most or rows.num_rows.shape != (1,):
        raise ValueError(f"{len(rows.most)} maxima, inputs of {most} rows")
    if device.uses_triton(rejected):
        move_early_rows_triton(rows, inputs, rejected, sampled, page_size)
    else:
        move_early_rows_reference(rows, inputs, rejected, sampled, page_size)


def move_early_rows_reference(
    rows: EarlyRows, inputs: RowInputs, rejected: Tensor, sampled: Tensor, page_size: int
) -> None:
    num_rows = int(rows.num_rows)
    most, starts = rows.most[:num_rows], rows.starts[: num_rows + 1]
    lengths = inputs.lengths[:num_rows]
    by_row = torch.minimum(rejected[rows.slots[:num_rows]], most).clamp_(min=0)
    lengths -= by_row
    counts = starts.diff()
    each = torch.arange(num_rows, device=rejected.device).repeat_interleave(counts)
    places = (by_row > 0)[each].nonzero().squeeze(1)  # of tokens that move
    each = each[places]
    by, numbers = by_row[each], places - starts[each]
    indices = (lengths - counts)[each] + numbers
    for locations, page_starts in zip(inputs.locations, inputs.page_starts, strict=True):
        pages = inputs.page_ids[page_starts[each] + indices // page_size].long()
        locations[places] = pages * page_size + indices % page_size
    inputs.positions[..., places] -= by
    is_draft = numbers > 0
    guessed = rows.guesses[each[is_draft], (most[each] - by + numbers)[is_draft] - 1]
    inputs.token_ids[places[is_draft]] = guessed
    # Each earlier row has one sample less among the others.
    others = num_rows + places - each
    sampled[torch.where(numbers < counts[each] - 1, others, each)] -= by


def move_early_rows_triton(
    rows: EarlyRows, inputs: RowInputs, rejected: Tensor, sampled: Tensor, page_size: int
) -> None:
    most, guesses, starts, slots, num_rows = rows
    token_ids, positions, lengths, all_locations, all_page_starts, page_ids = inputs
    if not len(most):
        return
    last = len(all_locations) - 1
    for table, locations in enumerate(all_locations):
        _move_early_rows_kernel[(len(most),)](
            most,
            guesses,
            starts,
            slots,
            num_rows,
            rejected,
            token_ids,
            positions,
            lengths,
            locations,
            all_page_starts[table],
            page_ids,
            sampled,
            guesses.shape[1],
            positions.shape[-1],
            positions.shape[0] if positions.ndim == 2 else 1,
            PAGE_SIZE=page_size,
            IS_LAST=table == last,
            BLOCK=_LANES,
            num_warps=1,
            enable_fp_fusion=False,
        )


@bound
@triton.jit(
    do_not_specialize=[
        "most_ptr",
        "guesses_ptr",
        "starts_ptr",
        "slots_ptr",
        "num_rows_ptr",
        "rejected_ptr",
        "token_ids_ptr",
        "positions_ptr",
        "lengths_ptr",
        "locations_ptr",
        "page_starts_ptr",
        "page_ids_ptr",
        "sampled_ptr",
        "width",
        "plane",
        "num_planes",
    ]
)
def _move_early_rows_kernel(
    most_ptr,
    guesses_ptr,
    starts_ptr,
    slots_ptr,
    num_rows_ptr,
    rejected_ptr,
    token_ids_ptr,
    positions_ptr,
    lengths_ptr,
    locations_ptr,
    page_starts_ptr,
    page_ids_ptr,
    sampled_ptr,
    width,
    plane,
    num_planes,
    PAGE_SIZE: tl.constexpr,
    IS_LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Move the locations of one row in one page table. For the last table, move everything else of
    the row, too."""
    row = tl.program_id(0)
    num_rows = tl.load(num_rows_ptr)
    if row < num_rows:
        most = tl.load(most_ptr + row)
        by = tl.minimum(tl.load(rejected_ptr + tl.load(slots_ptr + row)), most)
        if by > 0:
            start = tl.load(starts_ptr + row)
            count = tl.load(starts_ptr + row + 1) - start
            length = tl.load(lengths_ptr + row) - by
            page_ids_ptr += tl.load(page_starts_ptr + row)
            guesses_ptr += row * width + most - by - 1
            for begin in range(0, count, BLOCK):
                numbers = begin + tl.arange(0, BLOCK)
                places = start + numbers
                inside = numbers < count
                indices = length - count + numbers
                pages = tl.load(page_ids_ptr + indices // PAGE_SIZE, mask=inside, other=0)
                locations = pages.to(tl.int64) * PAGE_SIZE + indices % PAGE_SIZE
                tl.store(locations_ptr + places, locations, mask=inside)
                if IS_LAST:
                    for number in range(num_planes):
                        at = positions_ptr + number * plane + places
                        tl.store(at, tl.load(at, mask=inside) - by, mask=inside)
                    is_draft = inside & (numbers > 0)
                    drafts = tl.load(guesses_ptr + numbers, mask=is_draft)
                    tl.store(token_ids_ptr + places, drafts, mask=is_draft)
                    # Each earlier row has one sample less among the others.
                    others = num_rows + places - row
                    at = sampled_ptr + tl.where(numbers < count - 1, others, row)
                    tl.store(at, tl.load(at, mask=inside) - by, mask=inside)
            if IS_LAST:
                tl.debug_barrier()  # other threads may still read it
                tl.store(lengths_ptr + row, length)
