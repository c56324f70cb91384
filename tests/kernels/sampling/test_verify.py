"""Verification of drafts against a loop in Python."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.sampling.verify import (
    DraftRows,
    verify_drafts,
    verify_drafts_reference,
    verify_drafts_triton,
)
from tests.kernels.conftest import DEVICE, check_refused

GARBAGE = -0x0BADBAD
NUM_SLOTS = 9
NO_TOKEN = -2

Verify = Callable[[DraftRows, Tensor, Tensor, Tensor], Tensor]


def rows_of(drafts: list[list[int]], sampled: list[list[int]]) -> tuple[DraftRows, Tensor]:
    """Return rows with these drafts, and the tokens sampled after each of their tokens.

    As in a step, the first samples are those after each row's last token.
    """
    counts = [1 + len(row) for row in drafts]
    starts = np.cumsum([0, *counts])
    token_ids = [token for row in drafts for token in (GARBAGE, *row)]
    flat = [row[-1] for row in sampled] + [token for row in sampled for token in row[:-1]]
    slots = np.random.default_rng(0).permutation(NUM_SLOTS)[: len(counts)]
    numbers = (starts.astype(np.int32), np.array(token_ids, np.int32), slots)
    firsts, tokens, own = (torch.from_numpy(each).to(DEVICE) for each in numbers)
    rows = DraftRows(firsts, tokens, own, len(counts), max(counts))
    return rows, torch.tensor(flat, dtype=torch.int32, device=DEVICE)


def check(verify: Verify, drafts: list[list[int]], sampled: list[list[int]]) -> None:
    rows, flat = rows_of(drafts, sampled)
    newest, rejected = (
        torch.full((NUM_SLOTS,), GARBAGE, dtype=torch.int32, device=DEVICE) for _ in range(2)
    )
    verified = verify(rows, flat, newest, rejected)
    assert verified.dtype == torch.int32 and verified.is_contiguous()
    counts, last, *tokens = verified.tolist()
    expected_newest, expected_rejected = [GARBAGE] * NUM_SLOTS, [GARBAGE] * NUM_SLOTS
    for row, (own, samples) in enumerate(zip(drafts, sampled, strict=True)):
        accepted = 0
        while accepted < len(own) and own[accepted] == samples[accepted]:
            accepted += 1
        assert counts[row] == accepted + 1
        assert last[row] == samples[accepted]
        assert [column[row] for column in tokens[: len(samples)]] == samples
        slot = int(rows.slots[row])
        expected_newest[slot] = max(samples[accepted], 0)
        expected_rejected[slot] = len(own) - accepted
    assert newest.tolist() == expected_newest
    assert rejected.tolist() == expected_rejected


def filled(size: object, **options: object) -> Tensor:
    """Return memory with arbitrary content, as torch.empty does on a device in use."""
    return torch.full(size, GARBAGE, **options)  # type: ignore[call-overload,no-any-return]


@pytest.fixture(params=[verify_drafts_reference, verify_drafts_triton, verify_drafts])
def verify(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Verify:
    monkeypatch.setattr(torch, "empty", filled)
    return request.param  # type: ignore[no-any-return]


CASES = {
    "all right": ([[5, 6, 7]], [[5, 6, 7, 8]]),
    "the first is wrong": ([[5, 6, 7]], [[4, 6, 7, 8]]),
    "the last is wrong": ([[5, 6, 7]], [[5, 6, 1, 8]]),
    "right after a wrong one": ([[5, 6, 7]], [[5, 1, 7, 8]]),
    "many": ([[*range(70)], [*range(69)]], [[*range(65), 1, *range(66, 71)], [*range(70)]]),
    "no drafts": ([[], []], [[3], [4]]),
    "fewer in each row": ([[1, 2], [3], []], [[1, 2, 9], [4, 9], [8]]),
    "the draft is 0": ([[0, 0], [0]], [[0, 1, 2], [0, 3]]),
    "no token": ([[5, 6], [0]], [[5, NO_TOKEN, 7], [NO_TOKEN, 0]]),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_drafts_are_accepted_up_to_the_first_wrong_one(
    verify: Verify, case: tuple[list[list[int]], list[list[int]]]
) -> None:
    check(verify, *case)


def test_random_drafts(verify: Verify) -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        counts = sorted(rng.integers(0, 9, rng.integers(1, NUM_SLOTS)).tolist(), reverse=True)
        drafts = [rng.integers(0, 2, count).tolist() for count in counts]
        check(verify, drafts, [rng.integers(0, 2, count + 1).tolist() for count in counts])


def test_a_step_without_rows(verify: Verify) -> None:
    words = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    nothing = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    rows = DraftRows(words, words, nothing, 0, 1)
    assert verify(rows, words, words, words).shape == (3, 0)
    assert words.tolist() == [0]


def test_padding_after_the_rows(verify: Verify) -> None:
    """Inputs of graphs are longer than the step."""
    rows, sampled = rows_of([[5, 6], [7]], [[5, 1, 2], [7, 8]])
    padded = rows._replace(
        starts=torch.cat((rows.starts, rows.starts[-1:].expand(3) + 2)),
        token_ids=torch.cat((rows.token_ids, rows.token_ids)),
        slots=torch.cat((rows.slots, rows.slots)),
    )
    results = []
    for each in (rows, padded):
        by_slot = torch.zeros(2, NUM_SLOTS, dtype=torch.int32, device=DEVICE)
        results.append((verify(each, sampled, *by_slot).tolist(), by_slot.tolist()))
    assert results[0] == results[1]


def test_wrong_arguments() -> None:
    rows, sampled = rows_of([[1], [2]], [[1, 2], [2, 3]])
    newest = torch.zeros(NUM_SLOTS, dtype=torch.int32, device=DEVICE)
    for wrong in (
        rows._replace(starts=rows.starts[1:]),
        rows._replace(slots=rows.slots[1:]),
        rows._replace(slots=rows.slots.int()),
        rows._replace(token_ids=rows.token_ids.float()),
    ):
        check_refused("int", verify_drafts, wrong, sampled, newest, newest)
    check_refused("int32", verify_drafts, rows, sampled.long(), newest, newest)
    check_refused("contiguous", verify_drafts, rows, sampled[::2], newest, newest)
