"""Gated norms, gates of heads and of a shared expert, compared with float64."""

import pytest
import torch

from kernels.experts import shared_expert
from kernels.experts.shared_expert import add_gated
from kernels.layers.output_gate import gate_heads
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


def test_wrong_gated_norms_are_rejected():
    x, gate, weight = torch.zeros(2, 4, 8), torch.zeros(2, 2, 16), torch.ones(8)
    check_refused("gate", gated_rms_norm, x, gate[..., 1:], weight, EPS)
    check_refused("weight", gated_rms_norm, x, gate, weight.double(), EPS)
    by_head = x.transpose(0, 1).contiguous().transpose(0, 1)
    check_refused("contiguous", gated_rms_norm, by_head, gate, weight, EPS)


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


def test_wrong_gates_of_heads_are_rejected():
    x, gate = torch.zeros(3, 8), torch.zeros(3, 2, 4)
    check_refused("does not fit", gate_heads, x, gate[:, :1])
    check_refused("does not fit", gate_heads, x, gate.double())
    check_refused("contiguous", gate_heads, x.t().contiguous().t(), gate)


@pytest.mark.parametrize("n, hidden", [(0, 8), (3, 64), (2, 181)])
@pytest.mark.parametrize("block", [4096, 64])
def test_a_shared_expert_is_added_through_its_gate(monkeypatch, implementation, n, hidden, block):
    monkeypatch.setattr(shared_expert, "MAX_BLOCK", block)
    y, shared, x = torch.randn(3, n, hidden, device=DEVICE)
    weight = torch.randn(1, hidden, device=DEVICE) * hidden**-0.5
    gate = (x.double() @ weight.double().T).sigmoid()
    actual = add_gated(y, shared, x, weight)
    torch.testing.assert_close(actual.double(), y + shared * gate, atol=1e-5, rtol=1e-5)


def test_shared_experts_of_other_shapes_are_rejected():
    x = torch.zeros(3, 8)
    check_refused("expected", add_gated, x, x, x, torch.zeros(8, 1))
    check_refused("contiguous", add_gated, x, torch.zeros(8, 3).T, x, torch.zeros(1, 8))
