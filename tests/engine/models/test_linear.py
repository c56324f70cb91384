"""Every form of a matrix computes its product, within the bounds given here."""

import pytest
import torch

from common.errors import ConfigError
from engine.models import open_checkpoint
from engine.models.linear import Matrix, StoredExpert, form_of, onednn
from engine.models.linear.dense import DenseForm, DenseLinear, WeightOnlyForm
from engine.models.linear.int8 import Int8Form, rounded
from engine.models.linear.onednn import PackedForm
from engine.models.linear.panels import Int8PanelForm, PanelForm
from engine.models.spec import LoadTarget
from kernels import device as devices
from kernels.experts.routing import Routing, route
from kernels.quantised import QuantFormat
from tests.support.hardware import devices as test_devices
from tests.support.hardware.devices import operators_here
from tests.support.models.checkpoints import (
    ARCHITECTURES,
    EXPERT_ARCHITECTURES,
    LATENT_ARCHITECTURES,
)
from tests.support.models.weights import nbytes

CPU = torch.device("cpu")
ROWS = (0, 1, 2, 8, 33, 256)
# [out, in]: whole blocks of a layout, and less than one.
SHAPES = ((384, 128), (320, 64), (64, 96), (1000, 72), (1, 16), (65, 601))

packs = pytest.mark.skipif(not onednn.packs_bfloat16(), reason="no packed products here")
multiplies_int8 = pytest.mark.skipif(not onednn.multiplies_int8(), reason="no int8 here")
F32, BF16, I8 = torch.float32, torch.bfloat16, torch.int8


def compiled(dtype):
    """Return the compiled products for matrices of a dtype, or skip the test."""
    operators = operators_here()
    if operators is None or not operators.multiplies(dtype):
        pytest.skip("no such compiled product here")
    return operators


def panels(dtype):
    return PanelForm(dtype, compiled(dtype))


def int8_panels():
    return Int8PanelForm(compiled(I8))


# With the dtype of inputs and outputs, and the bound of errors relative to an output's usual size.
FORMS = [
    pytest.param(lambda: DenseForm(CPU, F32), F32, 3e-6, id="dense float32"),
    pytest.param(lambda: DenseForm(CPU, BF16), BF16, 2e-2, id="dense bfloat16"),
    pytest.param(lambda: PackedForm(BF16), BF16, 2e-2, id="packed bfloat16", marks=packs),
    pytest.param(Int8Form, BF16, 6e-2, id="int8 of bfloat16", marks=multiplies_int8),
    pytest.param(Int8Form, F32, 5e-2, id="int8 of float32", marks=multiplies_int8),
    pytest.param(lambda: panels(F32), F32, 3e-6, id="float32 panels"),
    pytest.param(lambda: panels(BF16), BF16, 2e-2, id="bfloat16 panels"),
    pytest.param(int8_panels, BF16, 6e-2, id="int8 panels of bfloat16"),
    pytest.param(int8_panels, F32, 5e-2, id="int8 panels of float32"),
]
INT8 = [
    pytest.param(Int8Form, marks=multiplies_int8, id="oneDNN"),
    pytest.param(int8_panels, id="panels"),
]


@pytest.fixture
def form(make_form):
    return make_form()


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("make_form, dtype, bound", FORMS)
def test_a_product_is_close_to_the_exact_one_for_any_number_of_rows(
    form, dtype, bound, biased, shape
):
    weight = drawn(*shape)
    bias = drawn(shape[0], seed=1).to(dtype) if biased else None
    linear = form.hold(Matrix(weight), bias)
    for rows in ROWS:
        x = drawn(rows, shape[1], seed=2).to(dtype)
        y = linear.apply(x)
        exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        assert y.dtype == dtype and y.shape == exact.shape
        assert ((y - exact).abs() <= bound * shape[1] ** 0.5).all()


@pytest.mark.parametrize("make_form, dtype, bound", FORMS)
def test_rows_between_other_columns_are_read_in_place(form, dtype, bound):
    linear = form.hold(Matrix(drawn(96, 64)))
    wide = drawn(5, 128, seed=2).to(dtype)
    torch.testing.assert_close(
        linear.apply(wide[:, 32:96]), linear.apply(wide[:, 32:96].contiguous())
    )


@pytest.mark.parametrize("make_form, dtype, bound", FORMS)
def test_the_matrix_does_not_change_with_the_tensor_that_it_was_made_from(form, dtype, bound):
    stored, x = drawn(96, 64).to(dtype), drawn(3, 64, seed=2).to(dtype)
    linear = form.hold(Matrix(stored))
    before = linear.apply(x)
    stored.zero_()
    assert torch.equal(linear.apply(x), before)


@pytest.mark.parametrize("make_form, dtype, bound", FORMS)
def test_the_reported_bytes_are_the_allocated_ones(form, dtype, bound):
    for rows, columns in SHAPES:
        assert nbytes(form.hold(Matrix(drawn(rows, columns)))) == form.num_bytes(rows, columns)


@pytest.mark.parametrize("make_form, dtype, bound", FORMS)
def test_experts_are_close_to_their_exact_sum_for_any_number_of_rows(form, dtype, bound):
    """In stacks or separately. An expert may get no token, or all tokens the same expert."""
    count, hidden, inner, k = 5, 96, 64, 2
    stored = [
        (drawn(2 * inner, hidden, seed=2 * n) / 9, drawn(hidden, inner, seed=2 * n + 1) / 8)
        for n in range(count)
    ]
    experts = (StoredExpert(*map(Matrix, pair)) for pair in stored)
    net = form.experts(experts, count, "silu")
    expected_bytes = form.num_bytes(2 * inner, hidden) + form.num_bytes(hidden, inner)
    assert nbytes(net) == count * expected_bytes
    for rows in (1, 3, 40):
        x = drawn(rows, hidden, seed=7).to(dtype)
        weights, ids = route(drawn(rows, count, seed=rows), Routing(k, normalise=True))
        ids[0] = torch.tensor([4, 1])
        y = net.apply(x, weights, ids)
        exact = torch.zeros(rows, hidden, dtype=torch.float64)
        for row in range(rows):
            for weight, expert in zip(weights[row].tolist(), ids[row].tolist(), strict=True):
                gate_up, down = (part.double() for part in stored[expert])
                gate, up = (gate_up @ x[row].double()).chunk(2)
                exact[row] += weight * (down @ (torch.nn.functional.silu(gate) * up))
        assert y.dtype == dtype and y.shape == (rows, hidden)
        assert ((y - exact).abs() <= 2 * bound).all()


def test_bfloat16_is_packed_if_possible_and_float32_is_unchanged(monkeypatch):
    monkeypatch.setattr(onednn, "packs_bfloat16", lambda: True)
    assert isinstance(form_of(LoadTarget(CPU, torch.bfloat16)), PackedForm)
    for dtype in (torch.float32, torch.float16):
        assert form_of(LoadTarget(CPU, dtype)) == DenseForm(CPU, dtype)
    cuda = torch.device("cuda:0")
    assert form_of(LoadTarget(cuda, torch.bfloat16)) == DenseForm(cuda, torch.bfloat16)


def test_a_gpu_keeps_the_stored_format_if_it_can_widen_it(monkeypatch):
    cuda, capability = torch.device("cuda:0"), [(8, 9)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    kept = WeightOnlyForm(cuda, BF16)
    assert form_of(LoadTarget(cuda, BF16), QuantFormat("fp8", 128)) == kept
    capability[0] = (8, 6)
    assert form_of(LoadTarget(cuda, BF16), QuantFormat("fp8", 128)) == DenseForm(cuda, BF16)
    assert form_of(LoadTarget(cuda, BF16), QuantFormat("int4", 128)) == kept
    assert not isinstance(form_of(LoadTarget(CPU, BF16), QuantFormat("int4", 128)), WeightOnlyForm)


def test_a_torch_without_packed_products_uses_plain_ones(monkeypatch):
    monkeypatch.setattr(onednn, "_BFLOAT16", object())
    assert form_of(LoadTarget(CPU, torch.bfloat16)) == DenseForm(CPU, torch.bfloat16)


@pytest.mark.parametrize("make_form", INT8)
def test_the_bits_of_an_int8_row_do_not_depend_on_other_rows(form):
    linear = form.hold(Matrix(drawn(384, 128)), drawn(384, seed=1))
    x = drawn(40, 128, seed=2) * torch.logspace(-6, 6, 40)[:, None]
    together = linear.apply(x)
    assert torch.equal(together, torch.cat([linear.apply(row[None]) for row in x]))
    assert torch.equal(together[:3], linear.apply(x[:3]))


@pytest.mark.parametrize("make_form", INT8)
def test_rows_and_channels_in_int8_have_their_own_scales(form):
    """Large ones do not reduce the precision of small ones."""
    sizes = torch.logspace(-4, 4, 12)
    weight, x = drawn(12, 256) * sizes[:, None], drawn(12, 256, seed=2) * sizes[:, None]
    exact = x @ weight.T
    error = (form.hold(Matrix(weight)).apply(x) - exact) / (sizes[:, None] * sizes)
    assert error.abs().max() <= 5e-2 * 256**0.5


@pytest.mark.parametrize("make_form", INT8)
def test_a_row_of_zeros_in_int8_gives_the_bias(form):
    bias = drawn(96, seed=1)
    linear = form.hold(Matrix(torch.cat([drawn(95, 64), torch.zeros(1, 64)])), bias)
    assert torch.equal(linear.apply(torch.zeros(2, 64)), bias.expand(2, -1))


@pytest.mark.parametrize("make_form", INT8)
def test_a_large_matrix_is_quantized_like_its_channels_alone(form):
    weight, x = drawn(3000, 2048), drawn(2, 2048, seed=2)
    linear = form.hold(Matrix(weight))
    for rows in (slice(0, 5), slice(2040, 2056), slice(2990, 3000)):
        alone = form.hold(Matrix(weight[rows]))
        assert torch.equal(linear.apply(x)[:, rows], alone.apply(x))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_sums_in_int8_panels_equal_those_of_integers(dtype):
    weight, bias, x = (
        drawn(130, 999),
        drawn(130, seed=1).to(dtype),
        drawn(37, 999, seed=2).to(dtype),
    )
    linear = int8_panels().hold(Matrix(weight), bias)
    own = rounded(Matrix(weight))
    steps = 1e-30 + x.float().abs().amax(-1, keepdim=True) * torch.tensor(1 / 127.0)
    bytes = (x.float() / steps + 128.5).floor() - 128
    sums = (bytes.double() @ own.numbers.double().T).float()
    assert torch.equal(linear.apply(x), (sums * own.scales.flatten() * steps + bias).to(dtype))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_a_row_in_int8_that_is_not_finite_gives_no_finite_number(wrong):
    x = drawn(3, 64)
    x[1, 40] = wrong
    y = int8_panels().hold(Matrix(drawn(96, 64))).apply(x)
    assert not y[1].isfinite().any() and y[[0, 2]].isfinite().all()


def test_large_matrices_start_on_a_huge_page():
    form = panels(F32)
    large, small = (form.hold(Matrix(torch.ones(rows, 1024))) for rows in (1000, 64))
    assert large.panels.data_ptr() % (2 << 20) == 0
    for linear in (large, small):
        sums = linear.apply(torch.ones(1, 1024))
        assert torch.equal(sums, torch.full_like(sums, 1024))


def test_products_compiled_for_this_cpu_are_preferred(monkeypatch):
    class Everything:
        def multiplies(self, dtype):
            return dtype != torch.float16

    compiled = Everything()
    monkeypatch.setattr(devices, "compiled_for", lambda where: compiled)
    for dtype in (F32, BF16):
        assert form_of(LoadTarget(CPU, dtype)) == PanelForm(dtype, compiled)
    assert form_of(LoadTarget(CPU, torch.float16)) == DenseForm(CPU, torch.float16)
    assert form_of(LoadTarget(CPU, BF16, "int8")) == Int8PanelForm(compiled)


def test_int8_is_rejected_if_no_product_supports_it(monkeypatch):
    with pytest.raises(ConfigError, match=r"engine\.quantize: int8 .* on CPUs, .* cuda:0"):
        form_of(LoadTarget(torch.device("cuda:0"), torch.bfloat16, "int8"))
    monkeypatch.setattr(onednn, "multiplies_int8", lambda: False)
    with pytest.raises(ConfigError, match=r"engine\.quantize: int8 needs .*VNNI"):
        form_of(LoadTarget(CPU, torch.bfloat16, "int8"))


def taken_by(decoder):
    """Return the bytes of a decoder's weights. A tied head may be the embedding itself."""
    ends = decoder.ends
    shared = isinstance(ends.head, DenseLinear) and ends.head.weight is ends.embedding
    return nbytes((ends.embedding, ends.norm, *decoder.layers, *([] if shared else [ends.head])))


@pytest.mark.parametrize(
    "dtype, quantize",
    [(F32, "none"), (BF16, "none"), pytest.param(BF16, "int8", marks=multiplies_int8)],
)
@pytest.mark.parametrize("products", ["torch", "compiled"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "architecture", [*ARCHITECTURES, *EXPERT_ARCHITECTURES, *LATENT_ARCHITECTURES]
)
def test_weights_take_the_memory_reported_before_loading(
    checkpoint, monkeypatch, architecture, tied, products, dtype, quantize
):
    test_devices.use(products, monkeypatch)
    loadable = open_checkpoint(checkpoint(architecture, tie_word_embeddings=tied))
    decoder = loadable.load(LoadTarget(CPU, dtype, quantize))
    assert loadable.weight_bytes(LoadTarget(CPU, dtype, quantize)) == taken_by(decoder)
