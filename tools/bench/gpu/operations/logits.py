"""Operations on rows of logits: sampling compared with the usual sort, logprobs, penalties. Also
the verification of drafts, which follows.

The lower bound of each is one read of the logits. The error of sampling is the share of rows whose
token differs from the reference's.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kernels.sampling.bitmask import FORBIDDEN, apply_bitmask
from kernels.sampling.logprobs import logprobs
from kernels.sampling.penalties import apply_penalties
from kernels.sampling.sample import SamplingColumns, sample, sample_reference
from kernels.sampling.verify import DraftRows, verify_drafts, verify_drafts_reference
from tools.bench.gpu.ops import Op, relative_error, unequal_share, worst
from tools.bench.gpu.setting import Setting

NEAR_TIES = 0.02  # share of rows that may differ, because two tokens are within rounding error


def ops(setting: Setting) -> Iterator[Callable[[], Op]]:
    for rows in setting.sized((64, 128), (3,)):
        yield partial(_sample, setting, rows, "greedy")
        yield partial(_sample, setting, rows, "temperature")
        yield partial(_sample, setting, rows, "top-k and top-p, mixed")
    rows = setting.sized(64, 3)
    yield partial(_logprobs, setting, rows)
    yield partial(_penalties, setting, rows)
    yield partial(_bitmask, setting, rows)
    yield partial(_verify, setting, rows)


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

    def error() -> float:
        chosen = sample(fresh.clone(), columns)
        return unequal_share(chosen, sample_reference(fresh.clone(), columns))

    return Op(
        name="sample",
        shape=f"[{rows}, {fresh.shape[1]}] {kind}",
        call=lambda: sample(logits, columns),
        error=error,
        tolerance=0.0 if columns is None else NEAR_TIES,
        ceiling="read",
        amount=fresh.nbytes,
        prepare=lambda: logits.copy_(fresh),
        peers={"torch": lambda: _with_sort(logits, columns)},
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

    def error() -> float:
        of_tokens, ids, top = logprobs(logits, tokens, num_top)
        exact = logits.double().log_softmax(dim=-1)
        best = exact.topk(num_top, dim=-1).values
        return worst(
            relative_error(of_tokens, exact.gather(1, tokens.long()[:, None])[:, 0]),
            relative_error(top, best),
            relative_error(exact.gather(1, ids.long()), best),
        )

    return Op(
        name="logprobs",
        shape=f"[{rows}, {logits.shape[1]}] top {num_top}",
        call=lambda: logprobs(logits, tokens, num_top),
        error=error,
        tolerance=1e-4,
        ceiling="read",
        amount=logits.nbytes,
        peers={"torch": lambda: logits.float().log_softmax(dim=-1).topk(num_top, dim=-1)},
    )


def _penalties(setting: Setting, rows: int) -> Op:
    fresh = _logits(setting, rows).float()
    vocabulary = fresh.shape[1]
    counts = setting.integers(3, rows, vocabulary)
    places = torch.arange(rows, device=setting.device)
    strength = torch.full((rows,), 1.2, device=setting.device)
    logits = fresh.clone()
    call = partial(
        apply_penalties,
        logits,
        places,
        counts,
        places,
        repetition=strength,
        frequency=strength,
        presence=strength,
    )

    def error() -> float:
        logits.copy_(fresh)
        call()
        wide, by = fresh.double(), float(strength[0])
        repeated = torch.where(wide > 0, wide / by, wide * by)
        exact = torch.where(counts > 0, repeated - by * counts - by, wide)
        return relative_error(logits, exact)

    return Op(
        name="apply_penalties",
        shape=f"[{rows}, {vocabulary}]",
        call=call,
        error=error,
        tolerance=1e-5,
        ceiling="copy",
        amount=2 * fresh.nbytes + counts.nbytes,
        prepare=lambda: logits.copy_(fresh),
    )


def _bitmask(setting: Setting, rows: int) -> Op:
    fresh = _logits(setting, rows).float()
    vocabulary = fresh.shape[1]
    words = setting.integers(1 << 31, rows, -(-vocabulary // 32), dtype=torch.int64)
    bitmask = (words - (1 << 30)).int()
    places = torch.arange(rows, device=setting.device)
    logits = fresh.clone()

    def error() -> float:
        logits.copy_(fresh)
        apply_bitmask(logits, places, bitmask)
        bits = (bitmask[:, :, None] >> torch.arange(32, device=setting.device)) & 1
        allowed = bits.flatten(1)[:, :vocabulary].bool()
        return unequal_share(logits, fresh.masked_fill(~allowed, FORBIDDEN))

    return Op(
        name="apply_bitmask",
        shape=f"[{rows}, {vocabulary}]",
        call=lambda: apply_bitmask(logits, places, bitmask),
        error=error,
        tolerance=0.0,
        ceiling="read",
        amount=bitmask.nbytes + fresh.nbytes // 2,  # half of the logits are written
        prepare=lambda: logits.copy_(fresh),
    )


def _verify(setting: Setting, rows: int) -> Op:
    drafts = 3
    num_tokens = rows * (1 + drafts)
    starts = torch.arange(0, num_tokens + 1, 1 + drafts, device=setting.device).int()
    token_ids, sampled = (setting.integers(2, num_tokens) for _ in range(2))  # half are right
    slots = torch.arange(rows, device=setting.device)
    step = DraftRows(starts, token_ids, slots, rows, 1 + drafts)
    by_slot = [torch.zeros(rows, dtype=torch.int32, device=setting.device) for _ in range(4)]

    def error() -> float:
        own = verify_drafts(step, sampled, *by_slot[:2])
        expected = verify_drafts_reference(step, sampled, *by_slot[2:])
        pairs = ((own, expected), *zip(by_slot[:2], by_slot[2:], strict=True))
        return max(unequal_share(one, other) for one, other in pairs)

    return Op(
        name="verify_drafts",
        shape=f"[{rows}, {1 + drafts}]",
        call=lambda: verify_drafts(step, sampled, *by_slot[:2]),
        error=error,
        tolerance=0.0,
        ceiling="read",
        amount=token_ids.nbytes + sampled.nbytes,
        peers={"torch": lambda: verify_drafts_reference(step, sampled, *by_slot[2:])},
    )
