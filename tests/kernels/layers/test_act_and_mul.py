"""act(gate) * up, compared with float64."""

import math

import pytest
import torch

from kernels.layers.act_and_mul import act_and_mul
from tests.kernels.conftest import DEVICE


def in_float64(x, activation):
    gate, up = x.double().chunk(2, dim=-1)
    match activation:
        case "silu":
            return gate / (1 + torch.exp(-gate)) * up
        case "gelu":
            return gate * (1 + torch.special.erf(gate / math.sqrt(2))) / 2 * up
        case "gelu_tanh":
            inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
            return gate * (1 + torch.tanh(inner)) / 2 * up


SMALL = [(0, 64), (1, 1), (3, 63), (2, 1500)]
LARGE = [(1, 3072), (300, 14336)]  # of real models


@pytest.mark.parametrize(
    "n, d, dtype, tolerance",
    [
        *((*size, torch.float32, 2e-6) for size in SMALL),
        *((*size, torch.float16, 2**-10) for size in SMALL),
        *(pytest.param(*size, torch.float16, 2**-10, marks=pytest.mark.gpu) for size in LARGE),
        *(pytest.param(*size, torch.bfloat16, 2**-8, marks=pytest.mark.gpu) for size in LARGE),
    ],
)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_agrees_with_the_formula_in_float64(implementation, n, d, activation, dtype, tolerance):
    x = (torch.randn(n, 2 * d, device=DEVICE) * 2).to(dtype)
    actual = act_and_mul(x, activation)
    assert actual.dtype == dtype
    expected = in_float64(x, activation)
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


# In the interpreter, numpy warns of exp(200) = inf, which is correct: 1 (1 + inf) is 0.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_large_gates_saturate_without_nan(implementation, activation):
    gate = torch.tensor([[-3e4, -200.0, -30.0, 0.0, 30.0, 200.0, 3e4]], device=DEVICE)
    out = act_and_mul(torch.cat((gate, torch.full_like(gate, 2.0)), dim=1), activation)
    torch.testing.assert_close(out, 2 * gate.clamp(min=0), atol=1e-10, rtol=1e-6)


@pytest.mark.parametrize("x", [torch.zeros(2, 3), torch.zeros(4), torch.zeros(4, 2).t()])
def test_wrong_shapes_are_rejected(x):
    with pytest.raises(ValueError, match="contiguous"):
        act_and_mul(x, "silu")
