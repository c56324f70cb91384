"""Products with quantized matrices, compared with exact sums."""

import pytest
import torch

from kernels.layers.quantised_linear import quantised_linear, tile_for
from kernels.quantised import FLOATS, Quantisation, packed
from tests.kernels.conftest import DEVICE

# rows, outputs, inputs, inputs per scale
SHAPES = [
    (0, 32, 64, 0),
    (1, 32, 128, 64),
    (3, 40, 100, 0),  # neither width a whole number of tiles
    (5, 33, 200, 64),  # the last group is smaller
    (20, 48, 96, 32),
    (70, 130, 64, 16),  # more rows than a narrow tile
]


def quantised(outputs, inputs, group, kind):
    """Return random numbers, their quantized form, and the weights in float64."""
    groups = -(-inputs // group) if group else 1
    scales, zeros = torch.rand(outputs, groups, device=DEVICE) + 0.1, None
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, device=DEVICE)
    if kind == "int4":
        zeros = torch.randint(0, 16, (outputs, groups), dtype=torch.uint8, device=DEVICE)
        numbers = exact = codes
    elif kind == "fp4":
        scales = scales.bfloat16()
        numbers, exact = codes, torch.tensor(FLOATS, device=DEVICE)[codes.int()]
    elif kind == "fp8":
        numbers = exact = torch.randn(outputs, inputs, device=DEVICE).to(torch.float8_e4m3fn)
    else:
        numbers = exact = torch.randint(-128, 128, (outputs, inputs), device=DEVICE).char()
    wide = exact.double()
    for of_group, number in ((zeros, -1.0), (scales, None)):
        if of_group is None:
            continue
        each = of_group.double().repeat_interleave(group or inputs, 1)[:, :inputs]
        wide = wide - each if number else wide * each
    stored = packed(numbers) if kind in ("int4", "fp4") else numbers
    return stored, Quantisation(scales, group, zeros), wide


def drawn(rows, outputs, inputs, group, dtype=torch.float32, kind="fp8"):
    x = torch.randn(rows, inputs, device=DEVICE).to(dtype)
    bias = torch.randn(outputs, device=DEVICE).to(dtype)
    numbers, quantisation, weights = quantised(outputs, inputs, group, kind)
    return (x, numbers, quantisation, bias), x.double() @ weights.t() + bias.double()


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4", "fp4"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_close_to_the_exact_one(implementation, shape, kind):
    given, expected = drawn(*shape, kind=kind)
    size = expected.abs().max() if expected.numel() else 1.0
    found = quantised_linear(*given)
    torch.testing.assert_close(found.double(), expected, atol=1e-6 * size, rtol=1e-4)
    without = quantised_linear(*given[:-1])
    expected -= given[-1]
    torch.testing.assert_close(without.double(), expected, atol=1e-6 * size, rtol=1e-4)


def test_inputs_of_half_precision_are_not_rounded(implementation):
    given, expected = drawn(9, 64, 96, 32, torch.float16)
    found = quantised_linear(*given)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.double(), expected, atol=0.02, rtol=1e-3)


@pytest.mark.parametrize("rows", [1, 17, 300])
@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("group", [16, 96, 128, 4096])
def test_a_tile_has_inputs_of_one_group(rows, element_size, group):
    assert group % tile_for(rows, element_size, group).depth == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda x, numbers, own: (x[:, 1:], numbers, own),
        lambda x, numbers, own: (x.t(), numbers, own),
        lambda x, numbers, own: (x, numbers.float(), own),
        lambda x, numbers, own: (x, numbers, Quantisation(own.scales[:, 1:], own.group)),
        lambda x, numbers, own: (x, numbers, Quantisation(own.scales, 24)),
    ],
)
def test_arguments_that_do_not_fit_are_rejected(change):
    (x, numbers, quantisation, _), _ = drawn(64, 64, 64, 32)
    with pytest.raises(ValueError, match=r"expected|does not fit"):
        quantised_linear(*change(x, numbers, quantisation))
