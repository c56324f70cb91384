"""Every form of a matrix computes the product it stands for, within bounds stated here."""

import pytest
import torch

from common.engine.models import read_spec
from common.engine.models.checkpoint import Checkpoint
from common.engine.models.linear import form_of, onednn
from common.engine.models.linear.dense import DenseForm
from common.engine.models.linear.packed import PackedForm
from common.engine.models.weights import load_weights, weight_bytes
from tests.support.checkpoints import ARCHITECTURES, make_checkpoint

CPU = torch.device("cpu")
ROWS = (0, 1, 2, 8, 33, 256)
# [out, in]: whole blocks of a layout, and less than one.
SHAPES = ((384, 128), (320, 64), (64, 96), (1000, 72), (1, 16))

packs = pytest.mark.skipif(not onednn.packs_bfloat16(), reason="no packed products here")
FORMS = [
    pytest.param(DenseForm(CPU, torch.float32), id="dense float32"),
    pytest.param(DenseForm(CPU, torch.bfloat16), id="dense bfloat16"),
    pytest.param(PackedForm(torch.bfloat16), id="packed bfloat16", marks=packs),
]
# Of an output's usual size: what rounding weights and output to so many bits may do at worst.
BOUNDS = {torch.float32: 3e-6, torch.bfloat16: 2e-2}


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_product_is_near_the_exact_one_at_any_number_of_rows(form, biased, shape):
    weight, dtype = drawn(*shape), form.dtype
    bias = drawn(shape[0], seed=1).to(dtype) if biased else None
    linear = form.hold(weight, bias)
    for rows in ROWS:
        x = drawn(rows, shape[1], seed=2).to(dtype)
        y = linear.apply(x)
        exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        assert y.dtype == dtype and y.shape == exact.shape
        assert ((y - exact).abs() <= BOUNDS[dtype] * shape[1] ** 0.5).all()


@pytest.mark.parametrize("form", FORMS)
def test_rows_between_other_columns_are_read_where_they_are(form):
    linear = form.hold(drawn(96, 64), None)
    wide = drawn(5, 128, seed=2).to(form.dtype)
    torch.testing.assert_close(
        linear.apply(wide[:, 32:96]), linear.apply(wide[:, 32:96].contiguous())
    )


@pytest.mark.parametrize("form", FORMS)
def test_what_is_held_does_not_change_with_what_was_stored(form):
    stored, x = drawn(96, 64).to(form.dtype), drawn(3, 64, seed=2).to(form.dtype)
    linear = form.hold(stored, None)
    before = linear.apply(x)
    stored.zero_()
    assert torch.equal(linear.apply(x), before)


@pytest.mark.parametrize("form", FORMS)
def test_the_bytes_that_are_told_are_those_that_are_taken(form):
    for rows, columns in SHAPES:
        assert form.hold(drawn(rows, columns), None).nbytes == form.num_bytes(rows, columns)


def test_bfloat16_is_packed_where_it_can_be_and_float32_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(onednn, "packs_bfloat16", lambda: True)
    assert isinstance(form_of(CPU, torch.bfloat16), PackedForm)
    for dtype in (torch.float32, torch.float16):
        assert form_of(CPU, dtype) == DenseForm(CPU, dtype)
    cuda = torch.device("cuda:0")
    assert form_of(cuda, torch.bfloat16) == DenseForm(cuda, torch.bfloat16)


def test_a_torch_without_packed_products_computes_with_plain_ones(monkeypatch):
    monkeypatch.setattr(onednn, "_OPS", object())
    assert form_of(CPU, torch.bfloat16) == DenseForm(CPU, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_take_what_is_said_before_they_are_loaded(tmp_path, architecture, tied, dtype):
    directory = make_checkpoint(tmp_path, architecture, tie_word_embeddings=tied)
    checkpoint, spec = Checkpoint(directory), read_spec(directory)
    weights = load_weights(checkpoint, spec, CPU, dtype)
    taken = weights.embedding.nbytes + weights.norm.nbytes
    shared = tied and form_of(CPU, dtype) == DenseForm(CPU, dtype)
    taken += 0 if shared else weights.head.nbytes
    for layer in weights.layers:
        for name in layer.__slots__:
            part = getattr(layer, name)
            taken += 0 if part is None else part.nbytes
            bias = getattr(part, "bias", None)
            taken += 0 if bias is None else bias.nbytes
    assert weight_bytes(checkpoint, spec, CPU, dtype) == taken
