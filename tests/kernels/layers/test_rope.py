"""RoPE angles, compared with float64."""

import math

import pytest
import torch

from kernels.layers.rope import rope_angles
from tests.kernels.conftest import DEVICE

# Positions near and far, including one that would show an imprecise reduction of arguments.
POSITIONS = [0, 1, 2, 355, 710, 4095, 32768, 99991, 103993, 131071, 131072]


def angles_of(positions, frequencies, scale=1.0):
    ids = torch.tensor(positions, dtype=torch.int32, device=DEVICE)
    return rope_angles(ids, frequencies.to(DEVICE), scale)


@pytest.mark.parametrize("half, theta", [(1, 1.0), (3, 10.0), (64, 1e4), (64, 5e5)])
def test_angles_of_far_positions_are_accurate(implementation, half, theta):
    frequencies = 1.0 / theta ** (torch.arange(half) / half)
    actual = angles_of(POSITIONS, frequencies)
    product = torch.tensor(POSITIONS).float()[:, None] * frequencies
    expected = torch.stack((product.double().cos(), product.double().sin()))
    assert actual.dtype == torch.float32
    assert (actual.cpu().double() - expected).abs().max() < 2e-7


def test_the_scale_multiplies_cosines_and_sines(implementation):
    frequencies = torch.tensor([1.0, 0.1])
    plain = angles_of([0, 5], frequencies)
    torch.testing.assert_close(angles_of([0, 5], frequencies, 1.25), 1.25 * plain)
    expected = torch.tensor([math.sin(5.0), math.sin(0.5)], device=DEVICE)
    torch.testing.assert_close(plain[1, 1], expected)


def test_no_positions_give_no_angles(implementation):
    assert angles_of([], torch.ones(4)).shape == (2, 0, 4)


@pytest.mark.parametrize(
    "positions, frequencies",
    [
        (torch.zeros(2, dtype=torch.int64), torch.ones(2)),
        (torch.zeros(2, 1, dtype=torch.int32), torch.ones(2)),
        (torch.zeros(4, dtype=torch.int32)[::2], torch.ones(2)),
        (torch.zeros(2, dtype=torch.int32), torch.ones(2).double()),
    ],
)
def test_wrong_shapes_strides_and_dtypes_are_rejected(positions, frequencies):
    with pytest.raises(ValueError, match="expected"):
        rope_angles(positions, frequencies, 1.0)


@pytest.mark.gpu
def test_every_position_of_a_long_context_is_accurate():
    frequencies = 1.0 / 5e5 ** (torch.arange(64, device=DEVICE) / 64)
    positions = torch.arange(131073, dtype=torch.int32, device=DEVICE)
    product = (positions.float()[:, None] * frequencies).double()
    actual = rope_angles(positions, frequencies, 1.0).double()
    assert (actual - torch.stack((product.cos(), product.sin()))).abs().max() < 2e-7
