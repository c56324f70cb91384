"""Operations on rows of logits: sampling compared with the usual sort, logprobs, penalties. Also
the verification of drafts, which follows, and the move of rows after it.

The lower bound of each is one read of the logits. The error of sampling is the share of rows whose
token differs from the reference's.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kernels.sampling.bitmask import FORBIDDEN, apply_bitmask
from kernels.sampling.early_rows import (
    EarlyRows,
    RowInputs,
    move_early_rows,
    move_early_rows_reference,
)
from kernels.sampling.logprobs import logprobs
from kernels.sampling.penalties import apply_penalties
from kernels.sampling.sample import SamplingColumns, sample, sample_reference
from kernels.sampling.verify import DraftRows, verify_drafts, verify_drafts_reference
from tools.bench.gpu.operation import Compared, Make, Op
from tools.bench.gpu.setting import Floor, Setting

NEAR_TIES = 0.02  # share of rows that may differ, because two tokens are within rounding error
DRAFTS = 3
ROW_TOKENS = 1 + DRAFTS


def ops(setting: Setting) -> Iterator[Make]:
    for rows in setting.sized((64, 128), (3,)):
        for kind in ("greedy", "temperature", "top-k and top-p, mixed"):
            yield partial(_sample, setting, rows, kind)
    for make in (_logprobs, _penalties, _bitmask, _verify, _move):
        yield partial(make, setting, setting.sized(64, 3))


def _logits(setting: Setting, rows: int) -> Tensor:
    return setting.randn(rows, setting.sized(151936, 1000), scale=3.0)


def _columns(setting: Setting, rows: int, kind: str) -> SamplingColumns | None:
    if kind == "greedy":
        return None
    full = partial(torch.full, (rows,), device=setting.device)
    columns = SamplingColumns(
        temperature=full(0.8),
        top_k=full(0, dtype=torch.int32),
        top_p=full(1.0),
        min_p=full(0.0),
        seeds=setting.integers(1 << 30, rows, 2),
        positions=setting.integers(8192, rows),
    )
    if kind == "temperature":
        return columns
    place = torch.arange(rows, device=setting.device)
    return replace(
        columns,
        top_k=torch.where(place % 3 == 0, 50, 0).int(),
        top_p=torch.where(place % 3 == 1, 0.9, 1.0),
    )


def _sample(setting: Setting, rows: int, kind: str) -> Op:
    fresh, columns = _logits(setting, rows), _columns(setting, rows, kind)
    logits = fresh.clone()
    return Op(
        "sample",
        f"[{rows}, {fresh.shape[1]}] {kind}",
        lambda: sample(logits, columns),
        Floor("read", fresh.nbytes),
        lambda found: [(found, sample_reference(fresh.clone(), columns))],
        0.0 if columns is None else NEAR_TIES,
        peers={"torch": lambda: _with_sort(logits, columns)},
        prepare=lambda: logits.copy_(fresh),
    )


def _with_sort(logits: Tensor, columns: SamplingColumns | None) -> Tensor:
    """Sample in torch's usual way: sort, softmax, cumulative sum, and a race of exponentials."""
    if columns is None:
        return logits.argmax(dim=-1)
    logits = logits.float() / columns.temperature[:, None]
    ordered, tokens = logits.sort(dim=-1, descending=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    ordered.masked_fill_(
        (rank >= columns.top_k[:, None]) & (columns.top_k > 0)[:, None], -torch.inf
    )
    weights = ordered.softmax(dim=-1)
    ahead = weights.cumsum(dim=-1) - weights
    weights.masked_fill_(ahead > columns.top_p[:, None], 0.0)
    place = (weights / torch.empty_like(weights).exponential_()).argmax(dim=-1, keepdim=True)
    return tokens.gather(1, place)


def _logprobs(setting: Setting, rows: int) -> Op:
    logits, num_top = _logits(setting, rows), setting.sized(20, 2)
    tokens = setting.integers(logits.shape[1], rows)

    def compare(found: tuple[Tensor, Tensor, Tensor]) -> Compared:
        of_tokens, ids, top = found
        exact = logits.double().log_softmax(dim=-1)
        best = exact.topk(num_top, dim=-1).values
        yield of_tokens, exact.gather(1, tokens.long()[:, None])[:, 0]
        yield top, best
        yield exact.gather(1, ids.long()), best

    return Op(
        "logprobs",
        f"[{rows}, {logits.shape[1]}] top {num_top}",
        lambda: logprobs(logits, tokens, num_top),
        Floor("read", logits.nbytes),
        compare,
        1e-4,
        peers={"torch": lambda: logits.float().log_softmax(dim=-1).topk(num_top, dim=-1)},
    )


def _penalties(setting: Setting, rows: int) -> Op:
    fresh = _logits(setting, rows).float()
    counts = setting.integers(3, *fresh.shape)
    places = torch.arange(rows, device=setting.device)
    strength, logits = torch.full((rows,), 1.2, device=setting.device), fresh.clone()
    strengths = dict.fromkeys(("repetition", "frequency", "presence"), strength)

    def compare(_: object) -> Compared:
        wide, by = fresh.double(), float(strength[0])
        repeated = torch.where(wide > 0, wide / by, wide * by)
        return [(logits, torch.where(counts > 0, repeated - by * counts - by, wide))]

    return Op(
        "apply_penalties",
        f"[{rows}, {fresh.shape[1]}]",
        lambda: apply_penalties(logits, places, counts, places, **strengths),
        Floor("copy", 2 * fresh.nbytes + counts.nbytes),
        compare,
        1e-5,
        prepare=lambda: logits.copy_(fresh),
    )


def _bitmask(setting: Setting, rows: int) -> Op:
    fresh = _logits(setting, rows).float()
    vocabulary = fresh.shape[1]
    words = setting.integers(1 << 31, rows, -(-vocabulary // 32), dtype=torch.int64)
    bitmask = (words - (1 << 30)).int()
    places, logits = torch.arange(rows, device=setting.device), fresh.clone()

    def compare(_: object) -> Compared:
        bits = (bitmask[:, :, None] >> torch.arange(32, device=setting.device)) & 1
        allowed = bits.flatten(1)[:, :vocabulary].bool()
        exact = fresh.masked_fill(~allowed, FORBIDDEN)
        return [(logits.view(torch.int32), exact.view(torch.int32))]  # every number is equal

    return Op(
        "apply_bitmask",
        f"[{rows}, {vocabulary}]",
        lambda: apply_bitmask(logits, places, bitmask),
        Floor("read", bitmask.nbytes + fresh.nbytes // 2),  # half of the logits are written
        compare,
        prepare=lambda: logits.copy_(fresh),
    )


def _verify(setting: Setting, rows: int) -> Op:
    token_ids, sampled = (setting.integers(2, rows * ROW_TOKENS) for _ in range(2))  # half right
    step = DraftRows(_starts(setting, rows), token_ids, *_slots(setting, rows))
    # The newest tokens, the numbers of rejected drafts, and the result.
    own, exact = (
        [setting.integers(1, *size) for size in ((rows,), (rows,), (rows, 2 + ROW_TOKENS))]
        for _ in range(2)
    )

    def compare(_: None) -> Compared:
        verify_drafts_reference(step, sampled, *exact)
        yield from zip(own, exact, strict=True)

    return Op(
        "verify_drafts",
        f"[{rows}, {ROW_TOKENS}]",
        lambda: verify_drafts(step, sampled, *own),
        Floor("read", token_ids.nbytes + sampled.nbytes),
        compare,
        peers={"torch": lambda: verify_drafts_reference(step, sampled, *exact)},
    )


def _move(setting: Setting, rows: int) -> Op:
    num_tokens, length, page_size = rows * ROW_TOKENS, 200, 16
    most = setting.integers(1, rows) + DRAFTS
    guesses = setting.integers(1000, rows, 2 * DRAFTS)
    step = EarlyRows(most, guesses, _starts(setting, rows), *_slots(setting, rows))
    rejected, num_pages = setting.integers(1 + DRAFTS, rows), -(-length // page_size)
    fresh = [
        setting.integers(1000, num_tokens),  # ids
        setting.integers(1, num_tokens) + length,  # positions
        setting.integers(1, rows) + length,  # lengths
        setting.integers(1, num_tokens, dtype=torch.int64),  # locations
        setting.integers(1, num_tokens) + length,  # positions of samples
    ]
    page_starts = torch.arange(rows, dtype=torch.int32, device=setting.device) * num_pages
    page_ids = setting.integers(4096, rows * num_pages)
    own, exact = ([each.clone() for each in fresh] for _ in range(2))

    def moved(move: Callable[..., None], columns: list[Tensor]) -> None:
        ids, positions, lengths, locations, samples = columns
        inputs = RowInputs(ids, positions, lengths, [locations], [page_starts], page_ids)
        move(step, inputs, rejected, samples, page_size)

    def prepare() -> None:
        for columns in (own, exact):
            for column, each in zip(columns, fresh, strict=True):
                column.copy_(each)

    def compare(_: None) -> Compared:
        moved(move_early_rows_reference, exact)
        yield from zip(own, exact, strict=True)

    return Op(
        "move_early_rows",
        f"[{rows}, {ROW_TOKENS}]",
        lambda: moved(move_early_rows, own),
        Floor("read", 2 * sum(each.nbytes for each in fresh)),
        compare,
        peers={"torch": lambda: moved(move_early_rows_reference, exact)},
        prepare=prepare,
    )


def _starts(setting: Setting, rows: int) -> Tensor:
    """Return where the tokens of rows with drafts start."""
    return torch.arange(0, rows * ROW_TOKENS + 1, ROW_TOKENS, device=setting.device).int()


def _slots(setting: Setting, rows: int) -> tuple[Tensor, Tensor]:
    """Return a slot of each row, and the number of rows."""
    num_rows = torch.tensor([rows], dtype=torch.int32, device=setting.device)
    return torch.arange(rows, device=setting.device), num_rows
