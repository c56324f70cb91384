"""Error of logits with keys and values in 8 bits, and its upper bound."""

import random

import pytest
import torch

from engine.models import load
from tests.support.checkpoints import make_checkpoint
from tests.support.devices import CPU_AND_CUDA
from tests.support.steps import Recorder, Steps

LENGTH = 60
MODELS = [
    ("qwen3", "native"),
    ("gemma2", "native"),
    ("deepseek_v3", "native"),
    ("qwen3", "transformers"),
]
# Of the logits' spread, on average. Matrices of the tests' models are twice as large as usual.
ASTRAY = {torch.float8_e4m3fn: 0.15, torch.float8_e5m2: 0.4}


def logits(model, kept_in):
    """After each of the same tokens."""
    model = Recorder(model)
    steps = Steps(model, overlap=False, num_slots=1, context_length=128, kept_in=kept_in)
    slot = steps.add(random.Random(1).choices(range(2, 200), k=LENGTH))
    for start in range(LENGTH):
        steps.launch([(slot, start, start + 1)], samples=[True])
    steps.close()
    return torch.cat(model.seen)


@pytest.mark.parametrize("device", CPU_AND_CUDA)
@pytest.mark.parametrize("kind, backend", MODELS)
def test_logits_are_near_those_of_what_is_kept_as_it_is(tmp_path, kind, backend, device):
    directory = make_checkpoint(tmp_path, kind)
    model = load(directory, device, torch.float32, backend=backend)
    exact = logits(model, None)
    errors = {
        kept_in: float((logits(model, kept_in) - exact).std() / exact.std()) for kept_in in ASTRAY
    }
    assert all(0 < errors[kept_in] < most for kept_in, most in ASTRAY.items()), errors
    assert errors[torch.float8_e4m3fn] < errors[torch.float8_e5m2]
