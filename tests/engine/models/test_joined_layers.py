"""Layers computed in one call give the same bits as one by one."""

import pytest
import torch

from common.errors import RankLost
from engine.models import load, open_checkpoint
from engine.models.spec import LoadTarget
from engine.models.stack import InOneCall, LayerByLayer, stack_of
from engine.ranks import Share
from tests.support.engine.steps import Recorder, Steps
from tests.support.engine.thread_ranks import run_ranks
from tests.support.hardware import devices
from tests.support.hardware.devices import operators_here
from tests.support.models.checkpoints import VOCABULARY_SIZE, make_checkpoint
from tests.support.models.quantized_checkpoints import FORMATS, requantised

CPU, F32, BF16 = torch.device("cpu"), torch.float32, torch.bfloat16
WINDOWED = {
    "use_sliding_window": True,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"],
}
BIASED = {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "head_dim": 24}
# Both norms of a head, windows and so two tables, then four norms, caps, another activation, and
# biases.
MODELS = {"qwen3": WINDOWED, "gemma2": {}, "llama": BIASED}


@pytest.fixture(autouse=True)
def _compiled(monkeypatch):
    devices.use("compiled", monkeypatch)


def needs_products(dtype):
    if not operators_here().multiplies(dtype):
        pytest.skip("no such compiled product here")


def logits(model, stack, **options):
    """Return logits of chunked prompts, of a step with prompts and single tokens, and of single
    tokens."""
    before, model.stack = model.stack, stack
    recorder = Recorder(model)
    steps = Steps(recorder, overlap=False, **options)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY_SIZE, (3, 70), generator=generator).tolist()
    slots = [steps.add(each) for each in tokens]
    steps.launch([(slots[0], 0, 40), (slots[1], 0, 1)])
    steps.launch([(slots[0], 40, 70), (slots[2], 0, 17), (slots[1], 1, 2)])
    for place in range(17, 20):
        steps.launch([(slots[2], place, place + 1), (slots[1], place - 15, place - 14)])
    steps.close()
    model.stack = before
    return torch.cat(recorder.seen)


@pytest.mark.parametrize(
    "dtype, quantize, multiplied",
    [(F32, "none", F32), (BF16, "none", BF16), (BF16, "int8", torch.int8)],
    ids=["float32", "bfloat16", "int8"],
)
@pytest.mark.parametrize("architecture", MODELS)
def test_one_call_equals_layers_one_by_one(tmp_path, architecture, dtype, quantize, multiplied):
    needs_products(multiplied)
    directory = make_checkpoint(tmp_path, architecture, **MODELS[architecture])
    model = load(directory, CPU, dtype, quantize)
    assert isinstance(model.stack, InOneCall)
    assert torch.equal(logits(model, model.stack), logits(model, LayerByLayer(model.layers)))


@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16], ids=str)
def test_one_call_multiplies_4_bit_weights_in_their_stored_form(tmp_path, dtype):
    source = make_checkpoint(tmp_path / "source", "qwen3", **WINDOWED)
    directory, _ = requantised(source, tmp_path, FORMATS["awq"])
    model = load(directory, CPU, dtype)
    assert isinstance(model.stack, InOneCall)
    assert torch.equal(logits(model, model.stack), logits(model, LayerByLayer(model.layers)))


@pytest.mark.parametrize(
    "dtype", [F32, pytest.param(BF16, marks=pytest.mark.long)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize(
    "architecture, size",
    [
        ("qwen3", 2),
        pytest.param("qwen3", 4, marks=pytest.mark.long),
        pytest.param("gemma2", 2, marks=pytest.mark.long),
        ("llama", 2),
    ],
)
def test_ranks_sum_in_one_call_like_layer_by_layer(tmp_path, architecture, size, dtype):
    """Seen failing without each of the two sums of a layer."""
    needs_products(dtype)
    directory = make_checkpoint(tmp_path, architecture, **MODELS[architecture])
    whole = load(directory, CPU, dtype)

    def compute(share):
        model = open_checkpoint(directory).load(LoadTarget(CPU, dtype, share=share))
        assert isinstance(model.stack, InOneCall)
        one_by_one = logits(model, LayerByLayer(model.layers), share=share)
        return logits(model, model.stack, share=share), one_by_one

    precise = {"atol": 1e-4, "rtol": 1e-4} if dtype == F32 else {"atol": 0.1, "rtol": 0.1}
    for in_one_call, one_by_one in run_ranks(size, compute):
        assert torch.equal(in_one_call, one_by_one)
        torch.testing.assert_close(in_one_call, logits(whole, whole.stack), **precise)


def test_the_loss_of_a_rank_ends_the_call(tmp_path):
    needs_products(F32)

    class Lost:
        rank, size, sums = 0, 2, 0

        def all_reduce(self, x):
            self.sums += 1
            if self.sums == 3:
                raise RankLost("rank 1 has ended")
            return x

    group = Lost()
    model = open_checkpoint(make_checkpoint(tmp_path)).load(
        LoadTarget(CPU, F32, share=Share(0, 2, group))
    )
    assert isinstance(model.stack, InOneCall)
    with pytest.raises(RankLost, match="rank 1 has ended"):
        logits(model, model.stack, share=Share(0, 2, group))
    assert group.sums == 3


@pytest.mark.parametrize("architecture", [*MODELS, "qwen3_moe"])
def test_layers_in_groups_equal_all_layers(tmp_path, monkeypatch, architecture):
    directory = make_checkpoint(tmp_path, architecture, **MODELS.get(architecture, {}))
    model = load(directory, CPU, F32)
    whole = logits(model, model.stack)

    def forward(batch, pool, future_tokens, adapted=None, late=None):
        split = model.begin(batch, pool, future_tokens, adapted)
        for layer in range(len(model.layers)):
            split.advance(layer + 1)
        return split.complete()

    monkeypatch.setattr(model, "forward", forward)
    assert torch.equal(logits(model, model.stack), whole)


def test_layers_in_groups_are_computed_one_by_one_for_adapters(tmp_path, monkeypatch):
    model = load(make_checkpoint(tmp_path, "qwen3"), CPU, F32)
    added = []

    class Adapted:
        def add(self, product, x, y):
            added.append(product)

    def forward(batch, pool, future_tokens, adapted=None, late=None):
        split = model.begin(batch, pool, future_tokens, Adapted())
        split.advance(len(model.layers))
        return split.complete()

    monkeypatch.setattr(model, "forward", forward)
    logits(model, model.stack)
    assert {*added} == {product.linear for product in model.products}


@pytest.mark.parametrize("architecture", ["qwen3_moe", "qwen3_next", "gpt_oss"])
def test_layers_with_additional_parts_are_computed_one_by_one(tmp_path, architecture):
    model = load(make_checkpoint(tmp_path, architecture), CPU, F32)
    assert isinstance(model.stack, LayerByLayer)


def test_layers_with_other_products_are_computed_one_by_one(tmp_path, monkeypatch):
    devices.use("torch", monkeypatch)
    model = load(make_checkpoint(tmp_path), CPU, F32)
    assert isinstance(stack_of(model.layers), LayerByLayer)
