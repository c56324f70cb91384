"""Error of a quantized model relative to itself in float32, with the same tokens."""

import functools
import tempfile
from pathlib import Path

import pytest
import torch

from engine.models import Model, load
from engine.models.linear import onednn
from tests.support import devices
from tests.support.checkpoints import ARCHITECTURES, VOCABULARY_SIZE, make_checkpoint
from tests.support.steps import logits_after

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


@functools.cache
def exact_logits(architecture: str) -> torch.Tensor:
    """Return the logits in float32 of the checkpoint with this architecture."""
    with tempfile.TemporaryDirectory() as directory:
        model = load(make_checkpoint(Path(directory), architecture), CPU, torch.float32)
        return logits_of(model, drawn_tokens())


def drawn_tokens() -> list[int]:
    generator = torch.Generator().manual_seed(0)
    tokens: list[int] = torch.randint(0, VOCABULARY_SIZE, (150,), generator=generator).tolist()
    return tokens


@pytest.mark.parametrize("products", ["torch", "compiled"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype, quantize, largest, usual", BOUNDS)
def test_logits_of_the_same_tokens_stay_near_those_of_float32(
    tmp_path, monkeypatch, dtype, quantize, largest, usual, architecture, products
):
    exact = exact_logits(architecture)
    devices.use(products, monkeypatch)
    model = load(make_checkpoint(tmp_path, architecture), CPU, dtype, quantize)
    error = (logits_of(model, drawn_tokens()) - exact) / exact.std()
    assert error.abs().max() <= largest
    assert error.square().mean().sqrt() <= usual
