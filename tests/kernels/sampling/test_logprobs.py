"""Log-probabilities compared with float64, and alternatives with a sort in Python."""

import math

import pytest
import torch

from kernels.sampling.logprobs import logprobs
from tests.kernels.conftest import DEVICE, check_refused


def assert_correct(logits, tokens, num_top, *, atol=1e-5):
    """Args:
    logits: rows of a wider tensor, so that the memory between them must not be read.
    """
    n, vocabulary = logits.shape
    wide = torch.full((n, vocabulary + 3), math.nan, dtype=logits.dtype, device=DEVICE)
    wide[:, :vocabulary] = logits
    chosen, ids, top = logprobs(wide[:, :vocabulary], tokens.to(DEVICE), num_top)
    assert chosen.dtype == top.dtype == torch.float32 and ids.dtype == torch.int32
    exact = logits.double().log_softmax(dim=-1)
    likeliest = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :num_top]
    assert torch.equal(ids.cpu().long(), likeliest)
    places = tokens.long()[:, None]
    torch.testing.assert_close(
        chosen.cpu(), exact.gather(1, places)[:, 0].float(), rtol=0, atol=atol
    )
    torch.testing.assert_close(top.cpu(), exact.gather(1, likeliest).float(), rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("vocabulary, num_top", [(1, 1), (11, 11), (37, 0), (1000, 5), (4099, 12)])
def test_logprobs_are_those_of_float64(vocabulary, num_top, dtype, implementation):
    logits = (torch.randn(3, vocabulary) * 4 + 20).to(dtype)
    assert_correct(logits, torch.randint(vocabulary, (3,), dtype=torch.int32), num_top)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_gpu_searches_large_vocabularies(dtype):
    logits = (torch.randn(64, 151936) * 3).to(dtype)
    assert_correct(logits, torch.randint(151936, (64,), dtype=torch.int32), 20, atol=2e-5)


def test_of_equal_logits_the_lower_ids_are_first(implementation):
    logits = torch.randint(-1, 2, (2, 200)).float()
    assert_correct(logits, torch.tensor([0, 199], dtype=torch.int32), 90)
    assert_correct(torch.zeros(2, 20), torch.tensor([3, 4], dtype=torch.int32), 20)


def test_logits_far_apart_keep_their_difference(implementation):
    logits = torch.tensor([[3e4, 3e4 - 100.0, -3e4]])
    assert_correct(logits, torch.tensor([1], dtype=torch.int32), 3)


def test_a_row_without_a_token_counts_as_token_0(implementation):
    logits = torch.randn(1, 9, device=DEVICE)
    tokens = torch.tensor([[-2], [0]], dtype=torch.int32, device=DEVICE)
    assert logprobs(logits, tokens[0], 1)[0].tolist() == logprobs(logits, tokens[1], 1)[0].tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_has_no_logprobs_and_affects_no_other(bad, implementation):
    logits = torch.randn(3, 100, device=DEVICE)
    tokens = torch.tensor([70, 5, 3], dtype=torch.int32, device=DEVICE)
    good = logprobs(logits, tokens, 4)
    logits[1, 70] = bad
    chosen, ids, top = logprobs(logits, tokens, 4)
    assert chosen.isnan().tolist() == [False, True, False]
    assert ids[1].tolist() == [-1] * 4 and bool(top[1].isnan().all())
    for row in (0, 2):
        assert chosen[row] == good[0][row]
        assert torch.equal(ids[row], good[1][row]) and torch.equal(top[row], good[2][row])


def test_no_rows_give_none(implementation):
    none = torch.empty(0, dtype=torch.int32, device=DEVICE)
    chosen, ids, top = logprobs(torch.empty(0, 9, device=DEVICE), none, 4)
    assert chosen.shape == (0,) and ids.shape == top.shape == (0, 4)


def test_wrong_shapes_strides_and_dtypes_are_rejected():
    logits, tokens = torch.zeros(2, 5), torch.zeros(2, dtype=torch.int32)
    check_refused("float32", logprobs, logits.double(), tokens, 1)
    check_refused("strides", logprobs, torch.zeros(5, 2).T, tokens, 1)
    check_refused("tokens for 2 rows", logprobs, logits, tokens[:1], 1)
    check_refused("top 6 of 5", logprobs, logits, tokens, 6)
