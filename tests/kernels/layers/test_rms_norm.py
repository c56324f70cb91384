"""Add and RMSNorm, compared with float64 and with the rounding of Hugging Face's layers."""

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kernels.layers.rms_norm import MAX_BLOCK, add_rms_norm
from tests.kernels.conftest import DEVICE

EPS = 0.03  # so large that it has a visible effect


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def in_float64(x, residual, weight, rows=None):
    total = x.double() + (0 if residual is None else residual.double())
    total = total if rows is None else total[rows]
    return total / (total.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double(), total


def assert_close(actual, expected, tolerance=1e-5):
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.double(), other, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("n, hidden", [(0, 8), (1, 1), (3, 63), (5, 128), (2, MAX_BLOCK + 70)])
@pytest.mark.parametrize("with_residual", [True, False])
def test_agrees_with_the_formula_in_float64(implementation, n, hidden, with_residual):
    x, weight = randn(n, hidden) * 3, randn(hidden)
    residual = randn(n, hidden) if with_residual else None
    actual = add_rms_norm(x, residual, weight, EPS)
    assert_close(actual, in_float64(x, residual, weight))


@pytest.mark.parametrize("with_residual", [True, False])
def test_the_selected_rows_are_used_in_order(implementation, with_residual):
    x, weight = randn(6, 40), randn(40)
    residual = randn(6, 40) if with_residual else None
    rows = torch.tensor([9, 4, 0, 5, 4, 9], device=DEVICE)[1:5]
    actual = add_rms_norm(x, residual, weight, EPS, rows=rows)
    assert_close(actual, in_float64(x, residual, weight, rows))
    for empty in add_rms_norm(x, residual, weight, EPS, rows=rows[:0]):
        assert empty.shape == (0, 40)


def test_rows_of_x_and_of_the_residual_may_have_gaps(implementation):
    x, residual, weight = randn(4, 90)[:, 7:40], randn(8, 33)[::2], randn(33)
    for rows in (None, torch.tensor([3, 1], device=DEVICE)):
        actual = add_rms_norm(x, residual, weight, EPS, rows=rows)
        assert_close(actual, in_float64(x, residual, weight, rows))


def assert_rounded_alike(actual, expected):
    """Another order of summation rarely rounds differently. Another order of roundings often
    does."""
    assert actual.dtype == expected.dtype
    assert (actual != expected).float().mean() < 0.01
    torch.testing.assert_close(actual, expected)


def test_rounding_equals_hugging_faces(implementation):
    x, residual = randn(9, 196, dtype=torch.float16), randn(9, 196, dtype=torch.float16)
    layer = LlamaRMSNorm(196, eps=1e-6).to(DEVICE, torch.float16)
    layer.weight.data.normal_()
    with torch.no_grad():
        normed, total = add_rms_norm(x, residual, layer.weight, 1e-6)
        assert torch.equal(total, residual + x)
        assert_rounded_alike(normed, layer(residual + x))


def test_a_weight_in_float32_is_applied_before_rounding_as_in_gemma(implementation):
    x, layer = randn(9, 196, dtype=torch.float16), Gemma2RMSNorm(196, eps=1e-6).to(DEVICE)
    layer.weight.data.normal_()
    with torch.no_grad():
        normed, _ = add_rms_norm(x, None, 1 + layer.weight, 1e-6)
        assert_rounded_alike(normed, layer(x))


def test_inputs_are_not_changed(implementation):
    x, residual = randn(2, 8), randn(2, 8)
    before = x.clone(), residual.clone()
    add_rms_norm(x, residual, torch.ones(8, device=DEVICE), 1e-6)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@pytest.mark.parametrize(
    "x, residual, weight, rows",
    [
        (torch.zeros(2, 8), None, torch.zeros(7), None),
        (torch.zeros(8), None, torch.zeros(8), None),
        (torch.zeros(2, 8), torch.zeros(1, 8), torch.zeros(8), None),
        (torch.zeros(2, 8), torch.zeros(2, 8).half(), torch.zeros(8), None),
        (torch.zeros(2, 8), None, torch.zeros(8).half(), None),
        (torch.zeros(8, 2).t(), None, torch.zeros(8), None),
        (torch.zeros(2, 8), None, torch.zeros(8), torch.zeros(2, dtype=torch.int32)),
    ],
)
def test_wrong_shapes_strides_and_dtypes_are_rejected(x, residual, weight, rows):
    with pytest.raises(ValueError, match=r"expected|is not like|contiguous"):
        add_rms_norm(x, residual, weight, 1e-6, rows=rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
@pytest.mark.parametrize("n, hidden", [(1, 1024), (300, 4096), (64, 8192), (33, 12288)])
def test_agrees_with_float64_at_the_sizes_of_real_models(dtype, tolerance, n, hidden):
    x, residual, weight = (randn(*s, dtype=dtype) for s in ((n, hidden), (n, hidden), (hidden,)))
    rows = torch.arange(0, n, 3, device=DEVICE)
    for kept, chosen in ((residual, None), (None, None), (residual, rows)):
        normed, total = add_rms_norm(x, kept, weight, EPS, rows=chosen)
        expected = x if kept is None else kept + x
        assert torch.equal(total, expected if chosen is None else expected[chosen])
        # Of the rounded sum, because the kernel cannot undo this rounding.
        exact, _ = in_float64(total, None, weight)
        torch.testing.assert_close(normed.double(), exact, atol=tolerance, rtol=tolerance)
