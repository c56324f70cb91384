"""The gated shared expert added to the routed ones, compared with float64."""

import pytest
import torch

from kernels.experts import shared_expert
from kernels.experts.shared_expert import add_gated
from tests.kernels.conftest import DEVICE, check_refused


@pytest.mark.parametrize("n, hidden", [(0, 8), (3, 64), (2, 181)])
@pytest.mark.parametrize("block", [4096, 64])
def test_a_shared_expert_is_added_through_its_gate(monkeypatch, implementation, n, hidden, block):
    monkeypatch.setattr(shared_expert, "MAX_BLOCK", block)
    y, shared, x = torch.randn(3, n, hidden, device=DEVICE)
    weight = torch.randn(1, hidden, device=DEVICE) * hidden**-0.5
    gate = (x.double() @ weight.double().T).sigmoid()
    actual = add_gated(y, shared, x, weight)
    torch.testing.assert_close(actual.double(), y + shared * gate, atol=1e-5, rtol=1e-5)


def test_other_shapes_are_rejected():
    x = torch.zeros(3, 8)
    check_refused("expected", add_gated, x, x, x, torch.zeros(8, 1))
    check_refused("contiguous", add_gated, x, torch.zeros(8, 3).T, x, torch.zeros(1, 8))
