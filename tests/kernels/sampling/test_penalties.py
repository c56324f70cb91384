"""Penalties, compared with token lists counted in Python."""

import pytest
import torch

from kernels.sampling.penalties import (
    apply_penalties,
    apply_penalties_reference,
    apply_penalties_triton,
    count_tokens,
    count_tokens_reference,
    count_tokens_triton,
)
from tests.kernels.conftest import DEVICE, check_refused

VOCABULARY = 9


def penalised(logits, prompt, output, repetition, frequency, presence):
    expected = []
    for token, logit in enumerate(logits):
        if token in prompt or token in output:
            logit = logit / repetition if logit > 0 else logit * repetition
        count = output.count(token)
        expected.append(logit - frequency * count - presence * (count > 0))
    return expected


def counted(counts, row, prompt, output):
    for tokens, is_prompt in ((prompt, True), (output, False)):
        rows = torch.full((len(tokens),), row, device=DEVICE)
        ids = torch.tensor(tokens, dtype=torch.int64, device=DEVICE)
        count_tokens(counts, rows, ids, prompt=is_prompt)


@pytest.mark.parametrize(
    "repetition, frequency, presence",
    [
        (1.0, 0.0, 0.0),
        (1.3, 0.0, 0.0),
        (0.5, 0.0, 0.0),
        (1.0, 0.7, 0.0),
        (1.0, -0.4, 1.1),
        (2.0, 0.3, -1.5),
    ],
)
def test_logits_are_those_of_counted_token_lists(repetition, frequency, presence, implementation):
    histories = [([1, 1, 1, 4], [4, 4, 7]), ([0], []), ([2, 3], [5, 5, 5, 5])]
    counts = torch.zeros(5, VOCABULARY, dtype=torch.int32, device=DEVICE)
    rows, count_rows = torch.tensor([3, 0, 2]), torch.tensor([4, 1, 2])
    for count_row, (prompt, output) in zip(count_rows.tolist(), histories, strict=True):
        counted(counts, count_row, prompt, output)
    logits = torch.randn(4, VOCABULARY)
    expected = logits.clone()
    for row, (prompt, output) in zip(rows.tolist(), histories, strict=True):
        expected[row] = torch.tensor(
            penalised(logits[row].tolist(), prompt, output, repetition, frequency, presence)
        )
    logits = logits.to(DEVICE)
    apply_penalties(
        logits,
        rows.to(DEVICE),
        counts,
        count_rows.to(DEVICE),
        repetition=torch.full((3,), repetition, device=DEVICE),
        frequency=torch.full((3,), frequency, device=DEVICE),
        presence=torch.full((3,), presence, device=DEVICE),
    )
    torch.testing.assert_close(logits.cpu(), expected)


def test_a_step_counts_one_more_token_per_row(implementation):
    counts = torch.zeros(2, VOCABULARY, dtype=torch.int32, device=DEVICE)
    counted(counts, 1, [3], [3, 5])
    again = counts.clone()
    counted(counts, 1, [], [5])
    row = torch.tensor([1], device=DEVICE)
    token = torch.tensor([5], dtype=torch.int32, device=DEVICE)
    count_tokens(again, row, token, prompt=False)
    assert torch.equal(counts, again)


def test_a_row_without_a_token_counts_inside_the_vocabulary(implementation):
    counts = torch.zeros(1, VOCABULARY, dtype=torch.int32, device=DEVICE)
    row = torch.tensor([0], device=DEVICE)
    token = torch.tensor([-2], dtype=torch.int32, device=DEVICE)
    count_tokens(counts, row, token, prompt=False)
    assert counts.tolist() == [[1] + [0] * (VOCABULARY - 1)]


def test_no_rows_change_nothing(implementation):
    logits = torch.randn(2, VOCABULARY, device=DEVICE)
    before = logits.clone()
    counts = torch.ones(1, VOCABULARY, dtype=torch.int32, device=DEVICE)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    nothing = torch.empty(0, device=DEVICE)
    count_tokens(counts, none, none, prompt=False)
    apply_penalties(
        logits, none, counts, none, repetition=nothing, frequency=nothing, presence=nothing
    )
    assert torch.equal(logits, before) and bool((counts == 1).all())


@pytest.mark.parametrize("vocabulary", [1, 37, 4099, pytest.param(151936, marks=pytest.mark.gpu)])
def test_triton_gives_every_bit_of_the_reference(vocabulary):
    num_rows = 64 if vocabulary > 100_000 else 3
    counts = torch.zeros(num_rows + 2, vocabulary, dtype=torch.int32)
    there = counts.clone().to(DEVICE)
    for prompt in (True, False):
        rows = torch.randint(num_rows + 2, (700,))
        tokens = torch.randint(-1, min(vocabulary, 50), (700,))  # most of them several times
        count_tokens_reference(counts, rows, tokens, prompt=prompt)
        count_tokens_triton(there, rows.to(DEVICE), tokens.to(DEVICE), prompt=prompt)
    assert torch.equal(there.cpu(), counts)

    wide = torch.randn(num_rows + 1, vocabulary + 5) * 5
    columns = [
        torch.randperm(num_rows + 1)[:num_rows],
        counts,
        torch.randperm(num_rows + 2)[:num_rows],
        torch.rand(num_rows) + 0.5,
        torch.randn(num_rows),
        torch.randn(num_rows),
    ]
    changed = wide.clone().to(DEVICE)
    apply_penalties_triton(changed[:, :vocabulary], *(column.to(DEVICE) for column in columns))
    apply_penalties_reference(wide[:, :vocabulary], *columns)
    assert torch.equal(changed.cpu(), wide)


def test_wrong_shapes_strides_and_dtypes_are_rejected():
    counts, logits = torch.zeros(1, VOCABULARY, dtype=torch.int32), torch.zeros(1, VOCABULARY)
    none = {"repetition": torch.ones(1), "frequency": torch.zeros(1), "presence": torch.zeros(1)}
    row, two, strided = torch.tensor([0]), torch.tensor([0, 0]), torch.tensor([0, 0, 0])[::2]
    check_refused("rows and tokens", count_tokens, counts, two, row, prompt=True)
    check_refused("contiguous", count_tokens, counts, strided, two, prompt=True)
    check_refused("vocabulary", apply_penalties, logits[:, :4], row, counts, row, **none)
    check_refused("float32", apply_penalties, logits.half(), row, counts, row, **none)
    check_refused("length", apply_penalties, logits, row, counts, two, **none)
