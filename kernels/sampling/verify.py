"""Verification of drafts: a draft is accepted if it equals the token that was sampled at its index,
and all drafts of the row before it are accepted."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import device
from kernels.bound import bound

_WORDS = (torch.int32,) * 5
_LANES = 32  # one warp. Longer rows are read in several blocks


class DraftRows(NamedTuple):
    """The rows of a step whose tokens after the first one are drafts. All tensors are contiguous,
    and may have more entries than described.

    Attributes:
        starts: int32 [n + 1], where each row's tokens start. Every row has at least one.
        token_ids: int32 [any], the tokens.
        slots: int64 [n], distinct.
        num_rows: n.
        most: maximum number of tokens of a row.
    """

    starts: Tensor
    token_ids: Tensor
    slots: Tensor
    num_rows: int
    most: int


def verify_drafts(rows: DraftRows, sampled: Tensor, newest: Tensor, rejected: Tensor) -> Tensor:
    """Accept the drafts of each row up to the first wrong one.

    Args:
        sampled: int32 [any], the tokens sampled after each token: first after each row's last
            token, then after the others, row by row. Negative if there is no token.
        newest, rejected: int32 [any], contiguous. Entry slots[i] becomes the newest token of row i,
            or 0 if it has no valid token, and the number of its rejected drafts.
    Returns:
        int32 [2 + most, n]: the number of new tokens of each row, the last of them, then the
            samples after each of its tokens, of which the new tokens are the first.
    Raises:
        ValueError: wrong shapes, strides or dtypes.
    """
    starts, token_ids, slots, num_rows, _ = rows
    if starts.shape[0] <= num_rows or slots.shape[0] < num_rows or slots.dtype != torch.int64:
        raise ValueError(f"{len(slots)} slots, int64, and {len(starts)} starts of {num_rows} rows")
    dtypes = starts.dtype, token_ids.dtype, sampled.dtype, newest.dtype, rejected.dtype
    if dtypes != _WORDS:
        raise ValueError(f"int32 starts, tokens and results expected, got {dtypes}")
    if not (
        starts.is_contiguous()
        and token_ids.is_contiguous()
        and slots.is_contiguous()
        and sampled.is_contiguous()
        and newest.is_contiguous()
        and rejected.is_contiguous()
    ):
        raise ValueError("contiguous starts, tokens, slots and results expected")
    if device.uses_triton(sampled):
        return verify_drafts_triton(rows, sampled, newest, rejected)
    return verify_drafts_reference(rows, sampled, newest, rejected)


def verify_drafts_reference(
    rows: DraftRows, sampled: Tensor, newest: Tensor, rejected: Tensor
) -> Tensor:
    starts, slots = rows.starts[: rows.num_rows + 1], rows.slots[: rows.num_rows]
    firsts, counts = starts[:-1, None], starts.diff()
    numbers = torch.arange(rows.most, device=sampled.device)
    own = torch.arange(len(counts), device=sampled.device)[:, None]
    # Each earlier row has one sample less among the others.
    others = len(counts) + firsts - own + numbers
    tokens = sampled[torch.where(numbers < counts[:, None] - 1, others, own)]
    numbers = numbers[1:]
    is_draft = numbers < counts[:, None]
    drafts = rows.token_ids[(firsts + numbers).clamp(max=len(rows.token_ids) - 1)]
    is_right = (is_draft & (drafts == tokens[:, :-1])).int()
    accepted = is_right.cumprod(dim=1, dtype=torch.int32).sum(dim=1, dtype=torch.int32)
    last = tokens.gather(1, accepted[:, None].long()).squeeze(1)
    newest[slots] = last.clamp(min=0)
    rejected[slots] = counts - 1 - accepted
    return torch.cat((torch.stack((accepted + 1, last)), tokens.T))


def verify_drafts_triton(
    rows: DraftRows, sampled: Tensor, newest: Tensor, rejected: Tensor
) -> Tensor:
    num_rows, most = rows.num_rows, rows.most
    verified = torch.empty((2 + most, num_rows), dtype=torch.int32, device=sampled.device)
    if num_rows:
        _verify_drafts_kernel[(num_rows,)](
            rows.starts,
            rows.token_ids,
            rows.slots,
            sampled,
            newest,
            rejected,
            verified,
            num_rows,
            most,
            BLOCK=_LANES,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return verified


@bound
@triton.jit(
    do_not_specialize=[
        "starts_ptr",
        "token_ids_ptr",
        "slots_ptr",
        "sampled_ptr",
        "newest_ptr",
        "rejected_ptr",
        "verified_ptr",
        "num_rows",
        "most",
    ]
)
def _verify_drafts_kernel(
    starts_ptr,
    token_ids_ptr,
    slots_ptr,
    sampled_ptr,
    newest_ptr,
    rejected_ptr,
    verified_ptr,
    num_rows,
    most,
    BLOCK: tl.constexpr,
):
    """Verify the drafts of one row."""
    row = tl.program_id(0)
    first = tl.load(starts_ptr + row)
    num_drafts = tl.load(starts_ptr + row + 1) - first - 1
    others = num_rows + first - row  # each earlier row has one sample less among the others
    accepted = num_drafts
    for start in range(0, most, BLOCK):
        places = start + tl.arange(0, BLOCK)
        is_draft = places < num_drafts
        tokens = tl.load(sampled_ptr + tl.where(is_draft, others + places, row))
        drafts = tl.load(token_ids_ptr + first + 1 + places, mask=is_draft, other=0)
        wrong = is_draft & (drafts != tokens)
        accepted = tl.minimum(accepted, tl.min(tl.where(wrong, places, num_drafts)))
        tl.store(verified_ptr + (places + 2) * num_rows + row, tokens, mask=places < most)
    last = tl.load(sampled_ptr + tl.where(accepted < num_drafts, others + accepted, row))
    slot = tl.load(slots_ptr + row)
    tl.store(newest_ptr + slot, tl.maximum(last, 0))
    tl.store(rejected_ptr + slot, num_drafts - accepted)
    tl.store(verified_ptr + row, accepted + 1)
    tl.store(verified_ptr + num_rows + row, last)
