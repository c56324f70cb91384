"""Every form of a matrix computes the product it stands for, within bounds stated here."""

import pytest
import torch

from common.engine.models import read_spec
from common.engine.models.checkpoint import Checkpoint
from common.engine.models.linear import form_of, onednn
from common.engine.models.linear.dense import DenseForm
from common.engine.models.linear.int8 import Int8Form
from common.engine.models.linear.packed import PackedForm
from common.engine.models.weights import load_weights, weight_bytes
from common.errors import ConfigError
from tests.support.checkpoints import ARCHITECTURES, make_checkpoint

CPU = torch.device("cpu")
ROWS = (0, 1, 2, 8, 33, 256)
# [out, in]: whole blocks of a layout, and less than one.
SHAPES = ((384, 128), (320, 64), (64, 96), (1000, 72), (1, 16))

packs = pytest.mark.skipif(not onednn.packs_bfloat16(), reason="no packed products here")
multiplies_int8 = pytest.mark.skipif(not onednn.multiplies_int8(), reason="no int8 here")
F32, BF16 = torch.float32, torch.bfloat16
# With the dtype of inputs and outputs, and the bound of errors in units of an output's usual size.
FORMS = [
    pytest.param(DenseForm(CPU, F32), F32, 3e-6, id="dense float32"),
    pytest.param(DenseForm(CPU, BF16), BF16, 2e-2, id="dense bfloat16"),
    pytest.param(PackedForm(BF16), BF16, 2e-2, id="packed bfloat16", marks=packs),
    pytest.param(Int8Form(), BF16, 6e-2, id="int8 of bfloat16", marks=multiplies_int8),
    pytest.param(Int8Form(), F32, 5e-2, id="int8 of float32", marks=multiplies_int8),
]


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("form, dtype, bound", FORMS)
def test_a_product_is_near_the_exact_one_at_any_number_of_rows(form, dtype, bound, biased, shape):
    weight = drawn(*shape)
    bias = drawn(shape[0], seed=1).to(dtype) if biased else None
    linear = form.hold(weight, bias)
    for rows in ROWS:
        x = drawn(rows, shape[1], seed=2).to(dtype)
        y = linear.apply(x)
        exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        assert y.dtype == dtype and y.shape == exact.shape
        assert ((y - exact).abs() <= bound * shape[1] ** 0.5).all()


@pytest.mark.parametrize("form, dtype, bound", FORMS)
def test_rows_between_other_columns_are_read_where_they_are(form, dtype, bound):
    linear = form.hold(drawn(96, 64), None)
    wide = drawn(5, 128, seed=2).to(dtype)
    torch.testing.assert_close(
        linear.apply(wide[:, 32:96]), linear.apply(wide[:, 32:96].contiguous())
    )


@pytest.mark.parametrize("form, dtype, bound", FORMS)
def test_what_is_held_does_not_change_with_what_was_stored(form, dtype, bound):
    stored, x = drawn(96, 64).to(dtype), drawn(3, 64, seed=2).to(dtype)
    linear = form.hold(stored, None)
    before = linear.apply(x)
    stored.zero_()
    assert torch.equal(linear.apply(x), before)


@pytest.mark.parametrize("form, dtype, bound", FORMS)
def test_the_bytes_that_are_told_are_those_that_are_taken(form, dtype, bound):
    for rows, columns in SHAPES:
        assert form.hold(drawn(rows, columns), None).nbytes == form.num_bytes(rows, columns)


def test_bfloat16_is_packed_where_it_can_be_and_float32_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(onednn, "packs_bfloat16", lambda: True)
    assert isinstance(form_of(CPU, torch.bfloat16, "none"), PackedForm)
    for dtype in (torch.float32, torch.float16):
        assert form_of(CPU, dtype, "none") == DenseForm(CPU, dtype)
    cuda = torch.device("cuda:0")
    assert form_of(cuda, torch.bfloat16, "none") == DenseForm(cuda, torch.bfloat16)


def test_a_torch_without_packed_products_computes_with_plain_ones(monkeypatch):
    monkeypatch.setattr(onednn, "_BFLOAT16", object())
    assert form_of(CPU, torch.bfloat16, "none") == DenseForm(CPU, torch.bfloat16)


@multiplies_int8
def test_a_row_in_int8_gives_the_same_to_the_bit_whatever_is_beside_it():
    linear = Int8Form().hold(drawn(384, 128), drawn(384, seed=1))
    x = drawn(40, 128, seed=2) * torch.logspace(-6, 6, 40)[:, None]
    together = linear.apply(x)
    assert torch.equal(together, torch.cat([linear.apply(row[None]) for row in x]))
    assert torch.equal(together[:3], linear.apply(x[:3]))


@multiplies_int8
def test_rows_and_channels_in_int8_have_scales_of_their_own():
    """Large ones take nothing from the precision of small ones beside them."""
    sizes = torch.logspace(-4, 4, 12)
    weight, x = drawn(12, 256) * sizes[:, None], drawn(12, 256, seed=2) * sizes[:, None]
    exact = x @ weight.T
    error = (Int8Form().hold(weight, None).apply(x) - exact) / (sizes[:, None] * sizes)
    assert error.abs().max() <= 5e-2 * 256**0.5


@multiplies_int8
def test_a_row_of_zeros_in_int8_gives_the_bias():
    bias = drawn(96, seed=1)
    linear = Int8Form().hold(torch.cat([drawn(95, 64), torch.zeros(1, 64)]), bias)
    assert torch.equal(linear.apply(torch.zeros(2, 64)), bias.expand(2, -1))


@multiplies_int8
def test_a_large_matrix_is_quantised_as_its_channels_are_alone():
    weight, x = drawn(3000, 2048), drawn(2, 2048, seed=2)
    linear = Int8Form().hold(weight, None)
    for rows in (slice(0, 5), slice(2040, 2056), slice(2990, 3000)):
        alone = Int8Form().hold(weight[rows], None)
        assert torch.equal(linear.apply(x)[:, rows], alone.apply(x))


def test_int8_is_refused_where_nothing_multiplies_it(monkeypatch):
    with pytest.raises(ConfigError, match=r"engine\.quantize: int8 .* on a CPU .* cuda:0"):
        form_of(torch.device("cuda:0"), torch.bfloat16, "int8")
    monkeypatch.setattr(onednn, "multiplies_int8", lambda: False)
    with pytest.raises(ConfigError, match=r"engine\.quantize: int8 needs .*VNNI"):
        form_of(CPU, torch.bfloat16, "int8")


@pytest.mark.parametrize(
    "dtype, quantize",
    [(F32, "none"), (BF16, "none"), pytest.param(BF16, "int8", marks=multiplies_int8)],
)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_take_what_is_said_before_they_are_loaded(
    tmp_path, architecture, tied, dtype, quantize
):
    directory = make_checkpoint(tmp_path, architecture, tie_word_embeddings=tied)
    checkpoint, spec = Checkpoint(directory), read_spec(directory)
    weights = load_weights(checkpoint, spec, CPU, dtype, quantize)
    taken = weights.embedding.nbytes + weights.norm.nbytes
    shared = tied and form_of(CPU, dtype, quantize) == DenseForm(CPU, dtype)
    taken += 0 if shared else weights.head.nbytes
    for layer in weights.layers:
        for name in layer.__slots__:
            part = getattr(layer, name)
            taken += 0 if part is None else part.nbytes
            bias = getattr(part, "bias", None)
            taken += 0 if bias is None else bias.nbytes
    assert weight_bytes(checkpoint, spec, CPU, dtype, quantize) == taken
