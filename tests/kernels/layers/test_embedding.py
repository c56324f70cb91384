"""Embedding rows of known tokens, and of tokens that only the device knows."""

import pytest
import torch

from kernels.layers.embedding import embed
from tests.kernels.conftest import DEVICE

FUTURE = torch.tensor([3, 0, 6, 1], dtype=torch.int32)


@pytest.mark.parametrize("hidden", [1, 5, 64, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_negative_id_reads_the_last_token_of_its_slot(implementation, hidden, dtype):
    weight = torch.randn(7, 2 * hidden, device=DEVICE).to(dtype)[:, :hidden]
    token_ids = torch.tensor([9, 2, -1, 6, -3, 0, -4, -3], dtype=torch.int32, device=DEVICE)[1:]
    expected = torch.stack([weight[i] for i in (2, 3, 6, 6, 0, 1, 6)])
    assert torch.equal(embed(token_ids, FUTURE.to(DEVICE), weight), expected)


def test_no_tokens_give_no_rows(implementation):
    weight = torch.randn(7, 4, device=DEVICE)
    token_ids = torch.empty(0, dtype=torch.int32, device=DEVICE)
    assert embed(token_ids, FUTURE.to(DEVICE), weight).shape == (0, 4)


@pytest.mark.parametrize(
    "token_ids, future",
    [
        (torch.zeros(2, 2, dtype=torch.int32), FUTURE),
        (torch.zeros(2, dtype=torch.int64), FUTURE),
        (torch.zeros(2, dtype=torch.int32), FUTURE.long()),
        (torch.zeros(2, dtype=torch.int32), FUTURE[::2]),
    ],
)
def test_wrong_shapes_strides_and_dtypes_are_rejected(token_ids, future):
    with pytest.raises(ValueError, match="int32"):
        embed(token_ids, future, torch.zeros(7, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_are_exact_at_the_sizes_of_real_models(dtype):
    weight = torch.randn(151936, 4096, device=DEVICE, dtype=dtype)
    future = torch.randint(0, 151936, (256,), device=DEVICE, dtype=torch.int32)
    token_ids = torch.randint(0, 151936, (300,), device=DEVICE, dtype=torch.int32)
    token_ids[::3] = -torch.arange(1, 101, device=DEVICE, dtype=torch.int32)
    token_ids[-1] = 151935
    known = token_ids.where(token_ids >= 0, future[(-token_ids - 1).clamp(min=0).long()])
    assert torch.equal(embed(token_ids, future, weight), weight[known.long()])
