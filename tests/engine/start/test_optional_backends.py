"""Models compute the same with operations of optional packages, and nodes without them refuse to
start."""

from dataclasses import replace
from importlib.metadata import PackageNotFoundError

import pytest
import torch

from common.config import CacheConfig, EngineConfig
from common.errors import ConfigError
from engine.build import build
from engine.kv_cache.states import DraftState, PagedKV, PagedLatent, RecurrentState, StateCells
from engine.models import load
from engine.models.blocks.operations import use_operations
from engine.models.spec import ModelSpec
from kernels.backends import chosen
from kernels.backends.fla import FlashLinearAttention
from kernels.backends.flashinfer import FlashInfer
from tests.support.engine.steps import Recorder, Steps, prompt
from tests.support.hardware import optional_packages
from tests.support.hardware.devices import CPU, CUDA
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.tiny_models import make_tiny

KINDS = {
    "qwen3": {"Extend", "Decode"},
    "gemma2": {"Extend", "Decode"},  # soft caps, and windows in some layers
    "gpt_oss": {"Extend", "Decode"},  # sinks
    "deepseek_v3": {"Latent"},
    "qwen3_next": {"Extend", "Decode"},  # gates, and delta nets
    "olmo2": {"Extend", "Decode"},  # by a class of transformers
}


@pytest.fixture
def packages():
    """Use the fake operations in this process until the test ends."""
    flashinfer, fla = optional_packages.flashinfer(), optional_packages.fla()
    made = chosen.Operations(
        FlashInfer(flashinfer, CPU).plan_attention, FlashLinearAttention(fla).delta_rule
    )
    yield lambda: chosen.use_operations(made), flashinfer, fla
    chosen.use_operations(chosen.Operations())


def computed(model):
    """Return the logits of two prompts in chunks, computed beside decode steps."""
    recorder = Recorder(model)
    steps = Steps(recorder, overlap=False)
    long, short = steps.add(prompt(90)), steps.add(prompt(37, seed=1))
    steps.prefill(short)
    steps.launch([(long, 0, 50), (short, 37, 38)], samples=[False, True])
    steps.launch([(long, 50, 90), (short, 38, 39)])
    for _ in range(2):
        steps.decode(long, short)
    steps.close()
    return torch.cat(recorder.seen)


@pytest.mark.parametrize("kind", KINDS)
def test_whole_models_compute_the_same(tmp_path, packages, kind):
    use, flashinfer, fla = packages
    make = make_tiny if kind == "olmo2" else make_checkpoint
    model = load(make(tmp_path, kind), CPU, torch.float32)
    expected = computed(model)
    assert not flashinfer.plans
    use()
    torch.testing.assert_close(computed(model), expected, rtol=1e-3, atol=1e-3)
    assert {type(wrapper).__name__ for wrapper in flashinfer.plans} == KINDS[kind]
    assert bool(fla.calls) == (kind == "qwen3_next")


DELTA = RecurrentState((StateCells("delta", 4, (128, 128), torch.float32),))
SPEC = ModelSpec(
    architecture="any",
    vocabulary_size=8,
    hidden_size=8,
    dtype=torch.bfloat16,
    context_length=8,
    eos_token_ids=(),
    layers=(PagedKV(2, 128), DELTA),
    products_per_token=0,
)
FP8 = {"cache": CacheConfig(dtype="fp8_e4m3")}
ATTENTION, LINEAR = {"attention_backend": "flashinfer"}, {"linear_attention_backend": "fla"}


@pytest.mark.parametrize(
    "fields, device, dtype, changes, error",
    [
        (ATTENTION, CPU, torch.bfloat16, {}, "flashinfer needs a GPU, and the device is cpu"),
        (ATTENTION, CUDA, torch.float32, {}, "flashinfer does not compute float32: set engine.dty"),
        (ATTENTION, CUDA, torch.bfloat16, {"layers": (PagedKV(2, 96),)}, "heads of 96 numbers"),
        (
            ATTENTION,
            CUDA,
            torch.bfloat16,
            {"draft": DraftState((PagedKV(2, 80),))},
            "heads of 80 numbers",
        ),
        (ATTENTION, CUDA, torch.bfloat16, {"layers": (PagedLatent(288),)}, "latents of 288 num"),
        (
            ATTENTION | FP8,
            CUDA,
            torch.bfloat16,
            {"layers": (PagedLatent(576),)},
            "latents in 8 bits: set engine.cache.dtype to auto",
        ),
        (ATTENTION, CUDA, torch.bfloat16, {}, "flashinfer-python is not installed: install "),
        (
            ATTENTION,
            CUDA,
            torch.float16,
            {"layers": (PagedLatent(576),)},
            "flashinfer-python is not installed",
        ),
        (ATTENTION | FP8, CUDA, torch.bfloat16, {}, "flashinfer-python is not installed"),
        (LINEAR, CPU, torch.bfloat16, {}, "fla needs a GPU, and the device is cpu"),
        (LINEAR, CUDA, torch.float32, {}, "fla does not compute float32"),
        (
            LINEAR,
            CUDA,
            torch.bfloat16,
            {"layers": (PagedKV(2, 128),)},
            "fla has no effect: the model has no linear attention",
        ),
        (
            LINEAR,
            CUDA,
            torch.bfloat16,
            {"layers": (RecurrentState((StateCells("delta", 1, (512, 64)),)),)},
            "keys of 512 numbers",
        ),
        (LINEAR, CUDA, torch.bfloat16, {}, "fla-core is not installed: install fla-core==0.6"),
    ],
)
def test_unsupported_starts_are_refused(monkeypatch, fields, device, dtype, changes, error):
    missing = "importlib.metadata.version"
    monkeypatch.setattr(missing, lambda name: (_ for _ in ()).throw(PackageNotFoundError(name)))
    config = EngineConfig(model="m", **fields)
    with pytest.raises(ConfigError, match=error):
        use_operations(config, device, dtype, replace(SPEC, **changes))


def test_a_node_with_an_unsupported_operation_does_not_start(tmp_path):
    config = EngineConfig(model=str(make_checkpoint(tmp_path)), device="cpu", **ATTENTION)
    with pytest.raises(ConfigError, match="attention_backend: flashinfer needs a GPU"):
        build(config)


@pytest.mark.parametrize("fields", [ATTENTION, LINEAR])
def test_batch_invariance_needs_our_own_operations(fields):
    name, value = next(iter(fields.items()))
    with pytest.raises(ValueError, match=f"batch_invariant is not supported with {name} {value}"):
        EngineConfig(model="m", batch_invariant=True, **fields)


def test_the_default_is_our_own_operations(packages):
    packages[0]()
    use_operations(EngineConfig(model="m"), CPU, torch.float32, SPEC)
    assert chosen.operations() == chosen.Operations()
