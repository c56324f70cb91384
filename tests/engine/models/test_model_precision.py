"""Error of a model with fewer bits relative to itself in float32, with the same tokens."""

import functools
import random

import pytest
import torch

from engine.models import Model, load
from engine.models.linear import onednn
from tests.support.engine.steps import Recorder, Steps, logits_after
from tests.support.hardware import devices
from tests.support.hardware.devices import CPU_AND_CUDA
from tests.support.models.checkpoints import ARCHITECTURES, VOCABULARY_SIZE

CPU = torch.device("cpu")
int8 = pytest.mark.skipif(not onednn.multiplies_int8(), reason="no int8 here")
# Largest and usual (root mean square) error of a logit, in standard deviations of the logits.
BOUNDS = [
    pytest.param(torch.bfloat16, "none", 0.25, 0.05, id="bfloat16"),
    pytest.param(torch.bfloat16, "int8", 0.6, 0.1, id="int8", marks=int8),
    pytest.param(torch.float32, "int8", 0.6, 0.1, id="int8 of float32", marks=int8),
]


def logits_of(model: Model, tokens: list[int]) -> torch.Tensor:
    """Return the logits of the chunks' last tokens, and of every token from 100 on."""
    ends = [1, 16, 30, 33, 99, *range(100, len(tokens) + 1)]
    return logits_after(model, tokens, ends).float()


@pytest.fixture(scope="module")
def exact_logits(checkpoint):
    """Return a function that returns the logits of an architecture in float32."""
    return functools.cache(
        lambda architecture: logits_of(
            load(checkpoint(architecture), CPU, torch.float32), drawn_tokens()
        )
    )


def drawn_tokens() -> list[int]:
    generator = torch.Generator().manual_seed(0)
    tokens: list[int] = torch.randint(0, VOCABULARY_SIZE, (120,), generator=generator).tolist()
    return tokens


@pytest.mark.parametrize("products", ["torch", "compiled"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype, quantize, largest, usual", BOUNDS)
def test_logits_are_close_to_those_in_float32(
    checkpoint, exact_logits, monkeypatch, dtype, quantize, largest, usual, architecture, products
):
    exact = exact_logits(architecture)
    devices.use(products, monkeypatch)
    model = load(checkpoint(architecture), CPU, dtype, quantize)
    error = (logits_of(model, drawn_tokens()) - exact) / exact.std()
    assert error.abs().max() <= largest
    assert error.square().mean().sqrt() <= usual


NARROW = [
    *(("qwen3", "native"), ("gemma2", "native"), ("deepseek_v3", "native")),
    ("qwen3", "transformers"),
]
# Largest usual error of a logit. Matrices of the tests' models are twice as large as usual.
NARROW_BOUNDS = {torch.float8_e4m3fn: 0.15, torch.float8_e5m2: 0.4}


@pytest.mark.parametrize("device", CPU_AND_CUDA)
@pytest.mark.parametrize("kind, backend", NARROW)
def test_logits_over_kv_in_8_bits_are_close_to_those_over_exact_kv(
    checkpoint, kind, backend, device
):
    model = Recorder(load(checkpoint(kind), device, torch.float32, backend=backend))

    def logits(kept_in):
        model.seen.clear()
        steps = Steps(model, overlap=False, num_slots=1, context_length=128, kept_in=kept_in)
        slot = steps.add(random.Random(1).choices(range(2, 200), k=60))
        for start in range(60):
            steps.launch([(slot, start, start + 1)], samples=[True])
        steps.close()
        return torch.cat(model.seen)

    exact = logits(None)
    errors = [float((logits(kept_in) - exact).std() / exact.std()) for kept_in in NARROW_BOUNDS]
    assert all(0 < error < most for error, most in zip(errors, NARROW_BOUNDS.values(), strict=True))
    assert errors[0] < errors[1]
