"""Verification of drafts: a draft is accepted if it equals the token that was sampled at its index,
and all drafts of the row before it are accepted."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import device
from kernels.bound import bound

_WORDS = [torch.int32] * 7
_LANES = 32  # one warp. Longer rows are read in several blocks


class DraftRows(NamedTuple):
    """The rows of a step whose tokens after the first one are drafts. All tensors are contiguous,
    and may have more entries than described. Rows without tokens are skipped.

    Attributes:
        starts: int32 [n + 1], where each row's tokens start.
        token_ids: int32 [any], the tokens.
        slots: int64 [n], distinct.
        num_rows: int32 [1], n. It is on the device, so that graphs can have any number of rows.
    """

    starts: Tensor
    token_ids: Tensor
    slots: Tensor
    num_rows: Tensor


def verify_drafts(
    rows: DraftRows, sampled: Tensor, newest: Tensor, rejected: Tensor, verified: Tensor
) -> None:
    """Accept the drafts of each row up to the first wrong one.

    Args:
        sampled: int32 [any], the tokens sampled after each token: first after each row's last
            token, then after the others, row by row. Negative if there is no token.
        newest, rejected: int32 [any], contiguous. Entry slots[i] becomes the newest token of row i,
            or 0 if it has no valid token, and the number of its rejected drafts.
        verified: int32 [n or more, 2 + maximum tokens of a row], contiguous. Its rows become: the
            number of new tokens, the last of them, then the samples after each token of the row, of
            which the new tokens are the first.
    Raises:
        ValueError: wrong shapes, strides or dtypes.
    """
    starts, token_ids, slots, num_rows = rows
    most = min(len(starts) - 1, len(slots))
    if len(verified) > most or num_rows.shape != (1,) or slots.dtype != torch.int64:
        raise ValueError(f"{len(verified)} rows of results, int64 slots of {most} rows")
    words = starts, token_ids, num_rows, sampled, newest, rejected, verified
    if [each.dtype for each in words] != _WORDS:
        raise ValueError("int32 starts, tokens and results expected")
    if not (slots.is_contiguous() and all(map(Tensor.is_contiguous, words))):
        raise ValueError("contiguous starts, tokens, slots and results expected")
    if device.uses_triton(sampled):
        verify_drafts_triton(rows, sampled, newest, rejected, verified)
    else:
        verify_drafts_reference(rows, sampled, newest, rejected, verified)


def verify_drafts_reference(
    rows: DraftRows, sampled: Tensor, newest: Tensor, rejected: Tensor, verified: Tensor
) -> None:
    num_rows, most = int(rows.num_rows), verified.shape[1] - 2
    starts, slots = rows.starts[: num_rows + 1], rows.slots[:num_rows]
    counts = starts.diff()
    own = torch.arange(num_rows, device=sampled.device)[counts > 0]
    firsts, counts, slots = starts[own, None], counts[own], slots[own]
    numbers = torch.arange(most, device=sampled.device)
    # Each earlier row has one sample less among the others.
    others = num_rows + firsts - own[:, None] + numbers
    tokens = sampled[torch.where(numbers < counts[:, None] - 1, others, own[:, None])]
    numbers = numbers[1:]
    is_draft = numbers < counts[:, None]
    drafts = rows.token_ids[(firsts + numbers).clamp(max=len(rows.token_ids) - 1)]
    is_right = (is_draft & (drafts == tokens[:, :-1])).int()
    accepted = is_right.cumprod(dim=1, dtype=torch.int32).sum(dim=1, dtype=torch.int32)
    last = tokens.gather(1, accepted[:, None].long()).squeeze(1)
    newest[slots] = last.clamp(min=0)
    rejected[slots] = counts - 1 - accepted
    verified[own] = torch.cat((torch.stack((accepted + 1, last), dim=1), tokens), dim=1)


def verify_drafts_triton(
    rows: DraftRows, sampled: Tensor, newest: Tensor, rejected: Tensor, verified: Tensor
) -> None:
    if not len(verified):
        return
    _verify_drafts_kernel[(len(verified),)](
        rows.starts,
        rows.token_ids,
        rows.slots,
        rows.num_rows,
        sampled,
        newest,
        rejected,
        verified,
        verified.shape[1] - 2,
        BLOCK=_LANES,
        num_warps=1,
        enable_fp_fusion=False,
    )


@bound
@triton.jit(
    do_not_specialize=[
        "starts_ptr",
        "token_ids_ptr",
        "slots_ptr",
        "num_rows_ptr",
        "sampled_ptr",
        "newest_ptr",
        "rejected_ptr",
        "verified_ptr",
        "most",
    ]
)
def _verify_drafts_kernel(
    starts_ptr,
    token_ids_ptr,
    slots_ptr,
    num_rows_ptr,
    sampled_ptr,
    newest_ptr,
    rejected_ptr,
    verified_ptr,
    most,
    BLOCK: tl.constexpr,
):
    """Verify the drafts of one row."""
    row = tl.program_id(0)
    num_rows = tl.load(num_rows_ptr)
    if row < num_rows:
        first = tl.load(starts_ptr + row)
        num_drafts = tl.load(starts_ptr + row + 1) - first - 1
        if num_drafts >= 0:
            verified_ptr += row * (2 + most)
            others = num_rows + first - row  # each earlier row has one sample less among the others
            accepted = num_drafts
            for start in range(0, most, BLOCK):
                places = start + tl.arange(0, BLOCK)
                is_draft = places < num_drafts
                tokens = tl.load(sampled_ptr + tl.where(is_draft, others + places, row))
                drafts = tl.load(token_ids_ptr + first + 1 + places, mask=is_draft, other=0)
                wrong = is_draft & (drafts != tokens)
                accepted = tl.minimum(accepted, tl.min(tl.where(wrong, places, num_drafts)))
                tl.store(verified_ptr + 2 + places, tokens, mask=places < most)
            last = tl.load(sampled_ptr + tl.where(accepted < num_drafts, others + accepted, row))
            slot = tl.load(slots_ptr + row)
            tl.store(newest_ptr + slot, tl.maximum(last, 0))
            tl.store(rejected_ptr + slot, num_drafts - accepted)
            tl.store(verified_ptr, accepted + 1)
            tl.store(verified_ptr + 1, last)
