"""The gated norm, compared with float64."""

import pytest
import torch

from kernels.linear_attention.gated_norm import gated_rms_norm
from tests.kernels.conftest import DEVICE, check_refused

EPS = 0.03


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float16, 4e-3)])
@pytest.mark.parametrize("heads, groups, size", [(4, 2, 8), (3, 3, 13), (6, 1, 32)])
def test_a_head_is_normalized_weighted_and_gated(
    implementation, dtype, tolerance, heads, groups, size
):
    x = torch.randn(5, heads, size, device=DEVICE).to(dtype)
    gate = torch.randn(5, groups, heads // groups * size + 7, device=DEVICE).to(dtype)[..., 7:]
    weight = torch.randn(size, device=DEVICE).to(dtype)
    wide, z = x.double(), gate.double().reshape(5, heads, size)
    normed = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    expected = (normed * z * torch.sigmoid(z)).flatten(1)
    actual = gated_rms_norm(x, gate, weight, EPS)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)
    assert gated_rms_norm(x[:0], gate[:0], weight, EPS).shape == (0, heads * size)


def test_wrong_shapes_strides_and_dtypes_are_rejected():
    x, gate, weight = torch.zeros(2, 4, 8), torch.zeros(2, 2, 16), torch.ones(8)
    check_refused("gate", gated_rms_norm, x, gate[..., 1:], weight, EPS)
    check_refused("weight", gated_rms_norm, x, gate, weight.double(), EPS)
    by_head = x.transpose(0, 1).contiguous().transpose(0, 1)
    check_refused("contiguous", gated_rms_norm, by_head, gate, weight, EPS)
