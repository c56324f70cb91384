"""The move of early rows against a loop in Python."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.sampling.early_rows import (
    EarlyRows,
    RowInputs,
    move_early_rows,
    move_early_rows_reference,
    move_early_rows_triton,
)
from tests.kernels.conftest import DEVICE

GARBAGE = -0x0BADBAD
NUM_SLOTS = 9
PAGE_SIZE = 4
PADDING = 3  # entries after the described ones

Move = Callable[[EarlyRows, RowInputs, Tensor, Tensor, int], None]


class Row(NamedTuple):
    """A row of a step, as scheduled. `most`: tokens by which it may move back. `rejected`: drafts
    that its previous step rejected."""

    first: int
    count: int
    most: int = 0
    rejected: int = GARBAGE  # the previous step had no drafts


def draft(row: int, index: int) -> int:
    return 1000 * row + index


def as_scheduled(rows: list[Row], planes: int, tables: int) -> dict[str, np.ndarray]:
    """Return the inputs of the step, in host memory."""
    rng = np.random.default_rng(0)
    num_tokens, num_pages = (
        sum(row.count for row in rows),
        max(-(-(row.first + row.count) // PAGE_SIZE) for row in rows),
    )
    width = max(row.most + row.count - 1 for row in rows)
    made = {
        "most": np.array([row.most for row in rows]),
        "guesses": np.full((len(rows), width), GARBAGE),
        "starts": np.cumsum([0, *(row.count for row in rows)]),
        "slots": rng.permutation(NUM_SLOTS)[: len(rows)],
        "rejected": np.full(NUM_SLOTS, GARBAGE),
        "token_ids": np.full(num_tokens, GARBAGE),
        "positions": np.full((planes, num_tokens), GARBAGE),
        "lengths": np.array([row.first + row.count for row in rows]),
        "locations": np.full((tables, num_tokens), GARBAGE),
        "page_starts": 1 + np.arange(tables * len(rows)).reshape(tables, -1) * num_pages,
        "page_ids": rng.permutation(1 + tables * len(rows) * num_pages),
        "sampled": np.full(num_tokens, GARBAGE),
    }
    for row, each in enumerate(rows):
        made["rejected"][made["slots"][row]] = each.rejected
        for index in range(each.first - each.most + 1, each.first + each.count):
            if each.count > 1:
                made["guesses"][row, index - each.first + each.most - 1] = draft(row, index)
        _fill(made, row, each, each.first)
    return made


def _fill(made: dict[str, np.ndarray], row: int, each: Row, first: int) -> None:
    """Write the inputs of one row whose first token has index `first`."""
    start, others = int(made["starts"][row]), len(made["lengths"]) + int(made["starts"][row]) - row
    made["lengths"][row] = first + each.count
    for number in range(each.count):
        place, index = start + number, first + number
        made["token_ids"][place] = draft(row, index) if number else -row - 1
        made["positions"][:, place] = index + 7 * np.arange(len(made["positions"]))
        made["sampled"][others + number if number < each.count - 1 else row] = index + 1
        for table, page_starts in enumerate(made["page_starts"]):
            page = made["page_ids"][page_starts[row] + index // PAGE_SIZE]
            made["locations"][table, place] = page * PAGE_SIZE + index % PAGE_SIZE


def sent(column: np.ndarray, dtype: torch.dtype = torch.int32) -> Tensor:
    """Return a column on the device, with other entries after it."""
    padded = np.concatenate((column.reshape(-1), np.full(PADDING, GARBAGE)))
    return torch.from_numpy(padded).to(DEVICE, dtype)


def check(
    move: Move, rows: list[Row], planes: int = 1, tables: int = 1, num_rows: int | None = None
) -> None:
    """`num_rows`: only the first of the given rows are part of the step."""
    num_rows = len(rows) if num_rows is None else num_rows
    made = as_scheduled(rows, planes, tables)
    positions = torch.from_numpy(made["positions"]).to(DEVICE, torch.int32)
    inputs = RowInputs(
        sent(made["token_ids"]),
        positions[0] if planes == 1 else positions,
        sent(made["lengths"]),
        [sent(column, torch.int64) for column in made["locations"]],
        [sent(column) for column in made["page_starts"]],
        sent(made["page_ids"]),
    )
    guesses = torch.from_numpy(made["guesses"]).to(DEVICE, torch.int32)
    most, starts, slots = sent(made["most"]), sent(made["starts"]), sent(made["slots"], torch.int64)
    rejected, sampled = sent(made["rejected"]), sent(made["sampled"])
    count = torch.tensor([num_rows], dtype=torch.int32, device=DEVICE)
    early = EarlyRows(most[: len(rows)], guesses, starts, slots, count)
    move(early, inputs, rejected, sampled, PAGE_SIZE)
    for row, each in enumerate(rows[:num_rows]):
        _fill(made, row, each, each.first - max(min(each.rejected, each.most), 0))
    for name, tensor in (
        ("rejected", rejected),
        ("token_ids", inputs.token_ids),
        ("lengths", inputs.lengths),
        ("sampled", sampled),
    ):
        assert tensor.tolist() == [*made[name].reshape(-1).tolist(), *[GARBAGE] * PADDING], name
    assert guesses.tolist() == made["guesses"].tolist()
    assert positions.tolist() == made["positions"].tolist()
    for table, locations in enumerate(inputs.locations):
        assert locations.tolist() == [*made["locations"][table].tolist(), *[GARBAGE] * PADDING]


CASES = {
    "nothing was rejected": [Row(9, 4, most=3, rejected=0)],
    "all drafts were rejected": [Row(9, 4, most=3, rejected=3)],
    "some were": [Row(21, 3, most=2, rejected=1), Row(13, 3, most=3, rejected=2)],
    "more than the row may move": [Row(9, 2, most=1, rejected=5)],
    "over the start of a page": [Row(9, 5, most=4, rejected=2), Row(8, 2, most=1, rejected=1)],
    "more drafts than before": [Row(30, 6, most=1, rejected=1), Row(7, 2, most=5, rejected=4)],
    "no drafts": [Row(9, 1, most=3, rejected=2), Row(5, 1, most=1, rejected=1), Row(6, 1)],
    "rows with and without drafts": [Row(9, 3, most=2, rejected=2), Row(4, 2), Row(8, 1, 2, 1)],
    "beside a prompt": [Row(0, 11), Row(40, 1, most=2, rejected=2)],
    "many": [Row(100, 70, most=40, rejected=33), Row(80, 33, most=2, rejected=2), Row(3, 32)],
}


@pytest.fixture(params=[move_early_rows_reference, move_early_rows_triton, move_early_rows])
def move(request: pytest.FixtureRequest) -> Move:
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("rows", CASES.values(), ids=CASES.keys())
def test_rows_begin_earlier_by_the_rejected_drafts(move: Move, rows: list[Row]) -> None:
    check(move, rows)


@pytest.mark.parametrize("num_rows", [1, 0])
def test_padding_after_the_rows(move: Move, num_rows: int) -> None:
    """A graph has the same number of rows in every step."""
    check(move, [Row(9, 1, most=3, rejected=3), Row(21, 1, 2, 1)], num_rows=num_rows)


def test_every_page_table_and_every_axis_of_positions(move: Move) -> None:
    rows = [Row(9, 4, most=3, rejected=3), Row(21, 2, most=2, rejected=1), Row(5, 1)]
    check(move, rows, planes=3, tables=2)


def test_a_step_without_rows(move: Move) -> None:
    words, longs = (torch.full((2,), GARBAGE, dtype=dtype, device=DEVICE) for dtype in DTYPES)
    starts = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    inputs = RowInputs(words, words, words, [longs], [words], words)
    rows = EarlyRows(words, words[:, None], starts, longs, starts[:1])
    move(rows, inputs, words, words, PAGE_SIZE)
    assert words.tolist() == longs.tolist() == [GARBAGE] * 2


DTYPES = (torch.int32, torch.int64)


def test_wrong_arguments() -> None:
    words, longs = (torch.zeros(4, dtype=dtype, device=DEVICE) for dtype in DTYPES)
    rows, inputs = (
        EarlyRows(words[:2], words.view(2, 2), words, longs, words[:1]),
        RowInputs(*[words] * 3, [longs], [words], words),
    )
    for wrong, message in (
        (rows._replace(slots=words), "int64 slots"),
        (rows._replace(most=words), "4 maxima, inputs of 3 rows"),
        (rows._replace(starts=words[:2]), "2 maxima, inputs of 1 rows"),
        (rows._replace(num_rows=words), "2 maxima"),
        (rows._replace(guesses=words.view(2, 2).T), "contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            move_early_rows(wrong, inputs, words, words, PAGE_SIZE)
    with pytest.raises(ValueError, match="int32"):
        move_early_rows(rows, inputs._replace(lengths=longs), words, words, PAGE_SIZE)
