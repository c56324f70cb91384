"""Embedding rows, of known tokens and of tokens that only the device knows."""

import pytest
import torch

from kernels.embedding import embed

FUTURE = torch.tensor([3, 0, 6, 1], dtype=torch.int32)


@pytest.mark.parametrize("hidden", [1, 5, 64])
def test_a_negative_id_reads_the_last_token_of_its_slot(hidden):
    weight = torch.randn(7, hidden)
    token_ids = torch.tensor([2, -1, 6, -3, 0, -4, -3], dtype=torch.int32)
    expected = [2, 3, 6, 6, 0, 1, 6]
    assert torch.equal(embed(token_ids, FUTURE, weight), torch.stack([weight[i] for i in expected]))


def test_no_tokens_give_no_rows():
    weight = torch.randn(7, 4)
    assert embed(torch.empty(0, dtype=torch.int32), FUTURE, weight).shape == (0, 4)


@pytest.mark.parametrize(
    "token_ids, future",
    [
        (torch.zeros(2, 2, dtype=torch.int32), FUTURE),
        (torch.zeros(2, dtype=torch.int64), FUTURE),
        (torch.zeros(2, dtype=torch.int32), FUTURE.long()),
    ],
)
def test_wrong_shapes_and_dtypes_are_refused(token_ids, future):
    with pytest.raises(ValueError, match="int32"):
        embed(token_ids, future, torch.zeros(7, 4))
