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

Verify = Callable[[DraftRows, Tensor, Tensor, Tensor, Tensor], None]


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
    rows = DraftRows(firsts, tokens, own, words(1, value=len(counts)))
    return rows, torch.tensor(flat, dtype=torch.int32, device=DEVICE)


def words(*size: int, value: int = GARBAGE) -> Tensor:
    return torch.full(size, value, dtype=torch.int32, device=DEVICE)


def check(
    verify: Verify, drafts: list[list[int]], sampled: list[list[int]], wider: int = 0
) -> None:
    rows, flat = rows_of(drafts, sampled)
    newest, rejected = words(NUM_SLOTS), words(NUM_SLOTS)
    verified = words(len(drafts), 2 + max(map(len, sampled)) + wider)
    verify(rows, flat, newest, rejected, verified)
    expected_newest, expected_rejected = [GARBAGE] * NUM_SLOTS, [GARBAGE] * NUM_SLOTS
    for row, (own, samples) in enumerate(zip(drafts, sampled, strict=True)):
        accepted = 0
        while accepted < len(own) and own[accepted] == samples[accepted]:
            accepted += 1
        count, last, *tokens = verified[row].tolist()
        assert count == accepted + 1
        assert last == samples[accepted]
        assert tokens[: len(samples)] == samples
        slot = int(rows.slots[row])
        expected_newest[slot] = max(samples[accepted], 0)
        expected_rejected[slot] = len(own) - accepted
    assert newest.tolist() == expected_newest
    assert rejected.tolist() == expected_rejected


@pytest.fixture(params=[verify_drafts_reference, verify_drafts_triton, verify_drafts])
def verify(request: pytest.FixtureRequest) -> Verify:
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
    check(verify, *case, wider=3)  # graphs have memory for the maximum number of drafts


def test_random_drafts(verify: Verify) -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        counts = sorted(rng.integers(0, 9, rng.integers(1, NUM_SLOTS)).tolist(), reverse=True)
        drafts = [rng.integers(0, 2, count).tolist() for count in counts]
        check(verify, drafts, [rng.integers(0, 2, count + 1).tolist() for count in counts])


def test_a_step_without_rows(verify: Verify) -> None:
    rows = DraftRows(words(1, value=0), words(1), words(0).long(), words(1, value=0))
    by_slot = words(1)
    verify(rows, words(1), by_slot, by_slot, words(0, 3))
    assert by_slot.tolist() == [GARBAGE]


@pytest.mark.parametrize("num_rows", [2, 0])
def test_padding_after_the_rows(verify: Verify, num_rows: int) -> None:
    """Inputs and results of graphs are longer than the step."""
    rows, sampled = rows_of([[5, 6], [7]], [[5, 1, 2], [7, 8]])
    padded = DraftRows(
        torch.cat((rows.starts, rows.starts[-1:].expand(2) + 2)),
        torch.cat((rows.token_ids, rows.token_ids)),
        torch.cat((rows.slots, rows.slots)),
        words(1, value=num_rows),
    )
    by_slot, verified = words(2, NUM_SLOTS), words(4, 5)
    verify(padded, sampled, *by_slot, verified)
    assert (verified[num_rows:] == GARBAGE).all()
    if num_rows:
        expected, own = words(2, NUM_SLOTS), words(2, 5)
        verify(rows, sampled, *expected, own)
        assert verified[:num_rows].tolist() == own.tolist()
        assert by_slot.tolist() == expected.tolist()
    else:
        assert (by_slot == GARBAGE).all()


def test_rows_without_tokens(verify: Verify) -> None:
    """So a graph verifies nothing after a step without drafts, which may have early rows."""
    rows, sampled = rows_of([[5, 6], [7]], [[5, 1, 2], [7, 8]])
    by_slot, verified = words(2, NUM_SLOTS), words(2, 5)
    verify(rows._replace(starts=words(3, value=0)), sampled, *by_slot, verified)
    assert (by_slot == GARBAGE).all() and (verified == GARBAGE).all()


def test_wrong_arguments() -> None:
    rows, sampled = rows_of([[1], [2]], [[1, 2], [2, 3]])
    newest, verified = words(NUM_SLOTS), words(2, 4)
    for wrong in (
        rows._replace(starts=rows.starts[1:]),
        rows._replace(slots=rows.slots[1:]),
        rows._replace(slots=rows.slots.int()),
        rows._replace(token_ids=rows.token_ids.float()),
        rows._replace(num_rows=words(2)),
    ):
        check_refused("int", verify_drafts, wrong, sampled, newest, newest, verified)
    check_refused("int32", verify_drafts, rows, sampled.long(), newest, newest, verified)
    check_refused("contiguous", verify_drafts, rows, sampled[::2], newest, newest, verified)
