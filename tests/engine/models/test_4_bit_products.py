"""4-bit weights are multiplied on a CPU in their stored form."""

from dataclasses import replace

import pytest
import torch

from engine.models.linear import Matrix, StoredExpert, joined
from engine.models.linear.choose import AsStoredForm
from engine.models.linear.dense import DenseForm, DenseLinear
from engine.models.linear.panels import CodePanelForm, CodePanels
from kernels.quantised import QuantFormat
from tests.support.hardware.devices import CPU, operators_here

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# Relative to an output's usual size. Inputs are drawn in the dtype, so only sums and the output are
# rounded.
BOUNDS = {F32: 1e-6, F16: 1e-3, BF16: 8e-3}
# Outputs, inputs and the group: less than a panel, parts of panels, groups larger than the part
# widened at a time, groups smaller than a tile's word, and one group of everything.
SHAPES = ((1, 16, 16), (100, 128, 64), (130, 208, 16), (65, 1024, 512), (64, 1000, 0), (70, 96, 24))


@pytest.fixture
def form():
    operators = operators_here()
    if operators is None:
        pytest.skip("no C++ compiler")
    return AsStoredForm(CodePanelForm(operators), DenseForm(CPU, F32))


def matrix(outputs, inputs, group, kind):
    generator = torch.Generator().manual_seed(outputs + inputs)
    groups = inputs // group if group else 1
    codes = torch.randint(16, (outputs, inputs), dtype=torch.uint8, generator=generator)
    scales = torch.rand(outputs, groups, generator=generator) + 0.1
    zeros = torch.randint(16, (outputs, groups), dtype=torch.uint8, generator=generator)
    if kind == "fp4":
        return Matrix(codes, QuantFormat("fp4", group), scales.bfloat16())
    return Matrix(codes, QuantFormat("int4", group), scales, zeros)


def drawn(rows, inputs, dtype):
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(dtype)


@pytest.mark.parametrize("kind", ["int4", "fp4"])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_close_to_the_exact_one_and_rows_do_not_affect_each_other(
    form, shape, dtype, kind
):
    """384 rows share a panel, so the last of 385 rows is alone."""
    stored = matrix(*shape, kind)
    weight, bias = stored.floats().double(), torch.randn(shape[0]).to(dtype)
    linear = form.hold(stored, bias)
    assert isinstance(linear, CodePanels)
    x = drawn(385, shape[1], dtype)
    y, exact = linear.apply(x), x.double() @ weight.T + bias.double()
    size = (x.double().square() @ weight.T.square()).sqrt() + bias.abs()
    assert y.dtype == dtype and ((y - exact).abs() <= 10 * BOUNDS[dtype] * size).all()
    for rows in (0, 1, 2, 7, 17):
        assert torch.equal(linear.apply(x[:rows]), y[:rows])
    assert torch.equal(linear.apply(x[384:]), y[384:])


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_rows_between_other_columns_are_read_in_place(form, dtype):
    linear = form.hold(matrix(96, 64, 32, "int4"))
    wide = drawn(5, 129, dtype)
    part = wide[:, 33:97]
    assert torch.equal(linear.apply(part), linear.apply(part.contiguous()))


def test_a_row_that_is_not_finite_affects_no_other(form):
    linear = form.hold(matrix(96, 64, 32, "int4"))
    x = drawn(3, 64, BF16)
    clean = linear.apply(x)
    x[1, 5] = float("nan")
    y = linear.apply(x)
    assert y[1].isnan().all() and torch.equal(y[::2], clean[::2])


@pytest.mark.parametrize("kind", ["int4", "fp4"])
def test_weights_take_the_memory_of_their_stored_form(form, kind):
    stored = matrix(128, 256, 32, kind)
    linear = form.hold(stored)
    held = [linear.panels, linear.scales, *([linear.zeros] if kind == "int4" else [])]
    taken = sum(each.nbytes for each in held)
    assert taken == form.num_bytes(128, 256, stored.format)
    assert taken < 128 * 256 * (0.73 if kind == "int4" else 0.57)


def test_groups_across_words_become_floats(form):
    """A rank's part of the inputs may have such groups."""
    whole = matrix(8, 64, 32, "int4")
    part = whole.columns(range(28, 64))
    linear = form.hold(part)
    assert isinstance(linear, DenseLinear)
    assert torch.equal(linear.weight, whole.floats()[:, 28:])
    assert form.num_bytes(8, 36, part.format) == linear.weight.nbytes


def reordered(order):
    """Return a matrix [64, 128] in groups of 32 whose inputs are in this order."""
    stored = matrix(64, 128, 32, "int4")
    return replace(stored, format=QuantFormat("int4", 32, reordered=True), order=order)


def test_inputs_in_activation_order_are_read_in_that_order(form):
    order = torch.randperm(128, generator=torch.Generator().manual_seed(1))
    stored, x = reordered(order), drawn(5, 128, F32)
    linear = form.hold(stored)
    assert isinstance(linear, CodePanels)
    held = linear.panels, linear.scales, linear.zeros, linear.order
    assert sum(each.nbytes for each in held) == form.num_bytes(64, 128, stored.format)
    plain = form.hold(replace(stored, format=QuantFormat("int4", 32), order=torch.empty(0)))
    assert torch.equal(linear.apply(x), plain.apply(x[:, order]))
    exact = x.double() @ stored.floats().double().T
    torch.testing.assert_close(linear.apply(x).double(), exact, rtol=1e-4, atol=1e-3)


def test_matrices_with_other_orders_of_inputs_are_joined_as_floats():
    """Also for a part of the inputs without consecutive groups."""
    one, other = reordered(torch.arange(128).flip(0)), reordered(torch.arange(128).roll(3))
    both = joined([one, other])
    assert both.format is None
    assert torch.equal(both.numbers, torch.cat([one.floats(), other.floats()]))
    assert joined([one, one]).format == one.format
    assert torch.equal(joined([one, one]).floats(), torch.cat([one.floats()] * 2))
    part = one.columns(range(32, 64))
    assert part.format is None and torch.equal(part.numbers, one.floats()[:, 32:64])
    assert one.format.within(range(32, 64), 128) is None


@pytest.mark.parametrize("kind", ["int4", "fp4"])
def test_experts_are_multiplied_in_their_stored_form(form, kind):
    nets = [(matrix(64, 48, 16, kind), matrix(48, 32, 16, kind)) for _ in range(3)]
    net = form.experts((StoredExpert(*pair) for pair in nets), 3, "silu")
    x, weights = drawn(20, 48, F32), torch.full((20, 2), 0.5)
    ids = torch.tensor([[0, 2], [1, 0]] * 10, dtype=torch.int32)
    floats = DenseForm(CPU, F32).experts(
        (StoredExpert(*(Matrix(each.floats()) for each in pair)) for pair in nets), 3, "silu"
    )
    y = net.apply(x, weights, ids)
    torch.testing.assert_close(y, floats.apply(x, weights, ids), rtol=1e-4, atol=1e-2)
    assert torch.equal(net.apply(x[:1], weights[:1], ids[:1]), y[:1])
