"""silu(gate) * up against float64."""

import pytest
import torch

from kernels.silu_and_mul import silu_and_mul


@pytest.mark.parametrize("n, d", [(0, 64), (1, 1), (3, 63), (7, 1536)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_agrees_with_the_formula_in_float64(n, d, dtype, tolerance):
    x = torch.randn(n, 2 * d).to(dtype)
    gate, up = x.double()[:, :d], x.double()[:, d:]
    expected = gate / (1 + torch.exp(-gate)) * up
    actual = silu_and_mul(x)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("x", [torch.zeros(2, 3), torch.zeros(4), torch.zeros(4, 2).t()])
def test_wrong_shapes_are_refused(x):
    with pytest.raises(ValueError, match="contiguous"):
        silu_and_mul(x)
