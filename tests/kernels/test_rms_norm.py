"""Add and RMSNorm, against float64 and against the rounding of Hugging Face's layers."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kernels.rms_norm import add_rms_norm


@pytest.mark.parametrize("n, hidden", [(0, 8), (1, 1), (3, 63), (17, 128)])
@pytest.mark.parametrize("with_residual", [True, False])
def test_agrees_with_the_formula_in_float64(n, hidden, with_residual):
    x, weight = torch.randn(n, hidden) * 3, torch.randn(hidden)
    residual = torch.randn(n, hidden) if with_residual else None
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    exact = x.double() + (0 if residual is None else residual.double())
    expected = exact / (exact.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(total.double(), exact, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(normed.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounds_where_hugging_face_rounds(dtype):
    x, residual = torch.randn(9, 96).to(dtype), torch.randn(9, 96).to(dtype)
    layer = LlamaRMSNorm(96, eps=1e-6).to(dtype)
    layer.weight.data.normal_()
    with torch.no_grad():
        normed, total = add_rms_norm(x, residual, layer.weight, 1e-6)
        assert torch.equal(total, residual + x)
        assert torch.equal(normed, layer(residual + x))


def test_inputs_are_left_as_they_were():
    x, residual = torch.randn(2, 8), torch.randn(2, 8)
    before = x.clone(), residual.clone()
    add_rms_norm(x, residual, torch.ones(8), 1e-6)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@pytest.mark.parametrize("x, residual, weight", [((2, 8), None, (7,)), ((2, 8), (1, 8), (8,))])
def test_wrong_shapes_are_refused(x, residual, weight):
    other = None if residual is None else torch.zeros(residual)
    with pytest.raises(ValueError, match=r"\("):
        add_rms_norm(torch.zeros(x), other, torch.zeros(weight), 1e-6)
