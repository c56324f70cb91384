"""`engine.batch_invariant`: an engine does not start if its bits could depend on the batch, and
names the cause."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from common.config import EngineConfig
from common.errors import ConfigError, LayoutMismatch
from engine import batch_invariance
from engine.kv_cache.layout import KVLayout
from engine.load import OpenedModel, model_fields
from engine.models import load, open_checkpoint
from engine.models.precision import Precision
from engine.models.probe import differing_operation
from engine.models.stack import LayerByLayer
from engine.models.transformers_backend.row_by_row import RowByRow
from kernels import device
from kernels.attention import paged
from kernels.backends import chosen
from kernels.linear_attention.delta_rule import delta_rule_reference
from kvtransfer.backends.base import PoolRegion
from kvtransfer.pairing import PairHello, compare
from tests.support.hardware import interpreter
from tests.support.hardware.devices import CPU, need_invariant_products, operators_here, use
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.quantized_checkpoints import FORMATS, requantised
from tests.support.models.tiny_models import make_tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("dense"), "gemma2")


@pytest.fixture(autouse=True)
def operators(monkeypatch):
    use("compiled", monkeypatch)


@pytest.fixture
def products(operators):
    need_invariant_products(torch.float32)


def refusal(directory, dtype=torch.float32, where=CPU, **settings):
    config = EngineConfig(model=str(directory), batch_invariant=True, **settings)
    loadable = open_checkpoint(directory, config.model_backend)
    with pytest.raises(ConfigError) as error:
        batch_invariance.check(config, where, dtype, loadable)
    return str(error.value)


def layout_of(model, kept_in=None):
    return KVLayout.of(model.spec.layers, 16, model.dtype, kept_in, model.spec.draft)


def keep(model):
    batch_invariance.keep(model, layout_of(model))


class Uneven:
    """A matrix whose products of several rows are rounded in another order than those of one
    row."""

    nbytes = 0

    def __init__(self, weight):
        self.weight = weight

    def apply(self, x):
        half = x.shape[1] // 2
        y = F.linear(x.double(), self.weight.double())
        if len(x) > 1:
            parts = x[:, :half], x[:, half:]
            y = F.linear(parts[0], self.weight[:, :half]) + F.linear(
                parts[1], self.weight[:, half:]
            )
        return y.to(x.dtype)


@pytest.mark.parametrize(
    "dtype, quantize",
    [(torch.float32, "none"), (torch.bfloat16, "none"), (torch.bfloat16, "int8")],
    ids=["float32", "bfloat16", "int8"],
)
def test_a_dense_model_passes(checkpoint, dtype, quantize):
    need_invariant_products(dtype, quantize)
    passes(checkpoint, dtype, quantize)


def passes(directory, dtype=torch.float32, quantize="none"):
    config = EngineConfig(model=str(directory), batch_invariant=True, quantize=quantize)
    batch_invariance.check(config, CPU, dtype, open_checkpoint(directory))
    keep(load(directory, CPU, dtype, quantize))


@pytest.mark.usefixtures("products")
def test_weights_of_4_bits_pass(checkpoint, tmp_path):
    passes(requantised(checkpoint, tmp_path, FORMATS["awq"])[0])


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "deepseek_v3", "qwen3_next"])
def test_experts_latents_and_states_pass(tmp_path, family):
    passes(make_checkpoint(tmp_path, family))


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("kind", ["phi3", "gpt2"])
def test_a_class_of_transformers_without_experts_passes(tmp_path, kind):
    passes(make_tiny(tmp_path, kind))


def test_a_class_that_multiplies_by_torch_is_rejected(tmp_path):
    model = load(make_tiny(tmp_path, "qwen3_moe"), CPU, torch.float32, backend="transformers")
    with pytest.raises(ConfigError, match=r"Qwen3MoeForCausalLM computes torch's .*mm,"):
        keep(model)


class Calls(nn.Module):
    """A module that only calls a function of [1, n, width]."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize(
    "function", [F.silu, torch.tanh, lambda x: x.pow(2).mean(-1, keepdim=True).rsqrt()]
)
def test_functions_of_rows_have_the_same_bits_in_any_batch(function):
    x, by_row = torch.randn(1, 3000, 90), RowByRow("Class")
    whole = by_row.call(Calls(function), x=x)
    torch.testing.assert_close(whole, function(x))
    for i in (0, 7, 2999):
        assert torch.equal(by_row.call(Calls(function), x=x[:, i : i + 1]), whole[:, i : i + 1])


@pytest.mark.parametrize(
    "function, words",
    [
        (lambda x: F.linear(x, x[0]), "mm"),
        (lambda x: torch.einsum("bnw,bmw->bnm", x, x), "bmm"),
        (lambda x: x.cumsum(1), "cumsum"),
        (lambda x: x.mean(1), "mean of more than one row"),
        (lambda x: torch.add(x, x, alpha=0.3), "add"),
        (lambda x: x.transpose(1, 2).sigmoid(), "functions that depend on the size of a step"),
    ],
    ids=["linear", "einsum", "sum of tokens", "mean of tokens", "two operations", "tokens last"],
)
def test_functions_that_may_depend_on_other_rows_are_rejected(function, words):
    by_row = RowByRow("Class")

    def computed():
        with torch.inference_mode():
            return [by_row.call(Calls(function), x=torch.randn(1, n, 90)) for n in (3, 5)]

    with pytest.raises(ConfigError, match=f"Class computes .*{words}"):
        computed()


@pytest.mark.usefixtures("products")
def test_experts_that_depend_on_other_rows_are_reported(tmp_path):
    model = load(make_checkpoint(tmp_path, "qwen3_moe"), CPU, torch.float32)
    first, *others = model.layers
    net = first.ffn.experts
    gate_up = Uneven(torch.randn(64, 64))
    broken = replace(net, nets=tuple((gate_up, down) for _, down in net.nets))
    model.layers = replace(first, ffn=replace(first.ffn, experts=broken)), *others
    model.stack = model._one_by_one = LayerByLayer(model.layers)
    assert differing_operation(model, layout_of(model)) == "the experts of layer 0"


@pytest.mark.usefixtures("products")
def test_a_product_that_depends_on_other_rows_is_reported(checkpoint):
    model = load(checkpoint, CPU, torch.float32)
    first, second = model.layers
    down = Uneven(torch.randn(64, 96))
    model.layers = first, replace(second, ffn=replace(second.ffn, down=down))
    model.stack = model._one_by_one = LayerByLayer(model.layers)
    assert differing_operation(model, layout_of(model)) == "down_proj of layer 1"


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize(
    "operation, name",
    [
        ("decode_attention", "attention of layer 0"),
        ("add_rms_norm", "input_layernorm of layer 0"),
        ("act_and_mul", "activation of layer 0"),
        ("float_product", "qkv_proj of layer 0"),
    ],
)
def test_an_operation_that_depends_on_the_batch_is_reported(
    checkpoint, monkeypatch, operation, name
):
    operators = operators_here()

    class Broken:
        """The operations, one of which gives other bits for a single row."""

        def __getattr__(self, asked):
            return getattr(operators, asked)

    def broken(*given, **options):
        result = getattr(operators, operation)(*given, **options)
        out = given[5] if result is None else result[0] if type(result) is tuple else result
        if len(out) == 1:
            out *= 1.0 + 2.0**-20
        return result

    setattr(Broken, operation, staticmethod(broken))
    monkeypatch.setattr(device, "compiled_for", lambda where: Broken())
    model = load(checkpoint, CPU, torch.float32)
    model.stack = LayerByLayer(model.layers)
    assert differing_operation(model, layout_of(model)) == name


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"parallel": {"pp": 2}}, "set engine.parallel.pp and dp to 1"),
        ({"parallel": {"tp": 2, "experts": "ep"}}, "set engine.parallel.experts to tp"),
        ({"parallel": {"tp": 2, "collectives": "gloo"}}, "set engine.parallel.collectives"),
        ({"model_backend": "transformers", "parallel": {"tp": 2}}, "engine.parallel.tp to 1"),
    ],
    ids=["stages", "whole experts", "gloo", "transformers"],
)
def test_an_incompatible_setting_is_rejected(checkpoint, settings, words):
    assert words in refusal(checkpoint, **settings)


class TestGpu:
    """A GPU whose kernels run in Triton's interpreter."""

    WHERE = torch.device("cuda", 0)

    @pytest.fixture(autouse=True)
    def _gpu(self, operators, monkeypatch, tmp_path):
        interpreter.patch_language_once()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(batch_invariance, "gpu_arithmetic", lambda where: "a GPU")
        use("torch", monkeypatch)  # otherwise some processors compute the layers in one call
        monkeypatch.setattr(device, "uses_triton", lambda tensor: True)
        device.use_batch_invariant(True)
        yield
        device.use_batch_invariant(False)

    @pytest.mark.long
    @pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_oss", "qwen2_moe", "deepseek_v3"])
    def test_a_model_passes(self, tmp_path, family):
        keep(load(make_checkpoint(tmp_path, family), CPU, torch.float32))

    @pytest.mark.long
    def test_attention_that_divides_keys_by_the_batch_is_reported(self, checkpoint, monkeypatch):
        model = load(checkpoint, CPU, torch.float32)
        shipped = paged.plan_split
        monkeypatch.setattr(
            paged, "plan_split", lambda *given, **kinds: shipped(*given, **kinds | {"segment": 0})
        )
        found = differing_operation(model, layout_of(model))
        assert found == "attention of layer 0"

    def test_a_gpu_starts_if_its_bits_have_been_compared(self, checkpoint):
        words = "run python -m tools.bench.gpu --parts compile bits, or set engine.device to cpu"
        assert words in refusal(checkpoint, where=self.WHERE)
        batch_invariance.record(self.WHERE, passed=True)
        config = EngineConfig(model=str(checkpoint), batch_invariant=True)
        loadable = open_checkpoint(checkpoint)
        batch_invariance.check(config, self.WHERE, torch.bfloat16, loadable)
        assert batch_invariance.arithmetic(1, "native", self.WHERE) == "a GPU"

    @pytest.mark.parametrize(
        "settings, words",
        [
            ({"parallel": {"tp": 2}}, "NCCL chooses: set engine.parallel.tp to 1"),
            ({"model_backend": "transformers"}, "models of the Transformers library"),
        ],
        ids=["ranks", "transformers"],
    )
    def test_an_incompatible_setting_is_rejected(self, checkpoint, settings, words):
        assert words in refusal(checkpoint, where=self.WHERE, **settings)

    def test_models_with_states_are_rejected(self, tmp_path):
        hybrid = make_checkpoint(tmp_path, "qwen3_next")
        assert "recurrent states are not supported on GPUs" in refusal(hybrid, where=self.WHERE)


@pytest.mark.usefixtures("products")
def test_float16_is_rejected(checkpoint):
    refused = refusal(checkpoint, torch.float16)
    assert "do not multiply float16" in refused and "set engine.dtype to float32" in refused


def test_a_start_without_compiled_kernels_is_rejected(checkpoint, monkeypatch):
    use("torch", monkeypatch)
    assert "set engine.cpu_kernels to auto" in refusal(checkpoint, cpu_kernels="off")
    assert "install a C++ compiler" in refusal(checkpoint)


def test_products_that_are_not_compiled_are_rejected(checkpoint, monkeypatch):
    class FloatsAlone:
        """The library of a processor with only AVX-512, which multiplies float32."""

        def multiplies(self, dtype):
            return dtype == torch.float32

    monkeypatch.setattr(device, "compiled_for", lambda where: FloatsAlone())
    refused = refusal(checkpoint, torch.bfloat16)
    assert "do not multiply bfloat16" in refused and "set engine.dtype to float32" in refused
    assert "do not multiply int8" in refusal(checkpoint, quantize="int8")


def test_a_layer_without_a_rule_is_rejected(tmp_path):
    model = load(make_checkpoint(tmp_path, "qwen3_next"), CPU, torch.float32)
    first, *others = model.layers
    model.layers = replace(first, mixer=object()), *others
    with pytest.raises(ConfigError, match="qwen3_next has layers that are not supported"):
        keep(model)


@pytest.mark.usefixtures("products")
def test_a_state_that_depends_on_chunks_is_reported(tmp_path, monkeypatch):
    model = load(make_checkpoint(tmp_path, "qwen3_5_text"), CPU, torch.float32)
    monkeypatch.setattr(chosen, "_used", [chosen.Operations(delta_rule=delta_rule_reference)])
    assert differing_operation(model, layout_of(model)) == "delta rule of layer 0"


def test_nodes_with_other_arithmetic_do_not_pair(checkpoint, monkeypatch):
    def hello(instance, *, promised):
        config = EngineConfig(model=str(checkpoint), batch_invariant=promised)
        loadable, float32 = open_checkpoint(checkpoint), Precision(torch.float32, "asked for")
        fields = model_fields(config, OpenedModel(checkpoint, loadable, CPU, float32))
        return PairHello.of(instance, f"node-{instance}:1", fields, [PoolRegion(0, 1, 1)], 0)

    compare(hello(1, promised=True), hello(2, promised=True))
    compare(hello(1, promised=False), hello(2, promised=False))
    ours, without = hello(1, promised=True), hello(2, promised=False)
    monkeypatch.setattr(torch, "__version__", "3.0")
    theirs = hello(2, promised=True)
    for other, value in ((without, "unset"), (theirs, repr(theirs.fingerprint["arithmetic"]))):
        with pytest.raises(LayoutMismatch) as error:
            compare(ours, other)
        own = repr(ours.fingerprint["arithmetic"])
        assert f"arithmetic is {own} here and {value} there." in str(error.value)
        assert ("--engine.batch-invariant" in str(error.value)) == (value == "unset")
