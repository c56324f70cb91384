"""Gates of heads, compared with float64."""

import pytest
import torch

from kernels.layers.output_gate import gate_heads
from tests.kernels.conftest import DEVICE, check_refused


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2**-6)])
@pytest.mark.parametrize("num_tokens, heads, size", [(0, 2, 8), (3, 2, 37), (5, 1, 64)])
def test_each_number_is_multiplied_by_the_sigmoid_of_its_gate(
    implementation, num_tokens, heads, size, dtype, tolerance
):
    x = torch.randn(num_tokens, heads * size, device=DEVICE).to(dtype)
    both = (torch.randn(num_tokens, heads, 2, size, device=DEVICE) * 4).to(dtype)
    gate = both[:, :, 1]
    actual = gate_heads(x, gate)
    assert actual.dtype == dtype
    expected = x.double() * torch.sigmoid(gate.double()).flatten(1)
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


def test_wrong_shapes_strides_and_dtypes_are_rejected():
    x, gate = torch.zeros(3, 8), torch.zeros(3, 2, 4)
    check_refused("does not fit", gate_heads, x, gate[:, :1])
    check_refused("does not fit", gate_heads, x, gate.double())
    check_refused("contiguous", gate_heads, x.t().contiguous().t(), gate)
