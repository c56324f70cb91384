"""Penalties against token lists counted in Python."""

import pytest
import torch

from kernels.penalties import apply_penalties, count_tokens

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
        rows = torch.full((len(tokens),), row)
        count_tokens(counts, rows, torch.tensor(tokens, dtype=torch.int64), prompt=is_prompt)


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
def test_logits_are_those_of_counted_token_lists(repetition, frequency, presence):
    histories = [([1, 1, 1, 4], [4, 4, 7]), ([0], []), ([2, 3], [5, 5, 5, 5])]
    counts = torch.zeros(5, VOCABULARY, dtype=torch.int32)
    rows, count_rows = torch.tensor([3, 0, 2]), torch.tensor([4, 1, 2])
    for count_row, (prompt, output) in zip(count_rows.tolist(), histories, strict=True):
        counted(counts, count_row, prompt, output)
    logits = torch.randn(4, VOCABULARY)
    expected = logits.clone()
    for row, (prompt, output) in zip(rows.tolist(), histories, strict=True):
        expected[row] = torch.tensor(
            penalised(logits[row].tolist(), prompt, output, repetition, frequency, presence)
        )
    apply_penalties(
        logits,
        rows,
        counts,
        count_rows,
        repetition=torch.full((3,), repetition),
        frequency=torch.full((3,), frequency),
        presence=torch.full((3,), presence),
    )
    torch.testing.assert_close(logits, expected)


def test_a_step_counts_one_more_token_per_row():
    counts = torch.zeros(2, VOCABULARY, dtype=torch.int32)
    counted(counts, 1, [3], [3, 5])
    again = counts.clone()
    counted(counts, 1, [], [5])
    count_tokens(again, torch.tensor([1]), torch.tensor([5], dtype=torch.int32), prompt=False)
    assert torch.equal(counts, again)


def test_a_row_without_a_token_counts_inside_the_vocabulary():
    counts = torch.zeros(1, VOCABULARY, dtype=torch.int32)
    count_tokens(counts, torch.tensor([0]), torch.tensor([-2], dtype=torch.int32), prompt=False)
    assert counts.tolist() == [[1] + [0] * (VOCABULARY - 1)]


def test_wrong_shapes_are_refused():
    counts = torch.zeros(1, VOCABULARY, dtype=torch.int32)
    none = {"repetition": torch.ones(1), "frequency": torch.zeros(1), "presence": torch.zeros(1)}
    row = torch.tensor([0])
    with pytest.raises(ValueError, match="rows and tokens"):
        count_tokens(counts, torch.tensor([0, 0]), row, prompt=True)
    with pytest.raises(ValueError, match="vocabulary"):
        apply_penalties(torch.zeros(1, 4), row, counts, row, **none)
    with pytest.raises(ValueError, match="length"):
        apply_penalties(torch.zeros(1, VOCABULARY), row, counts, torch.tensor([0, 0]), **none)
