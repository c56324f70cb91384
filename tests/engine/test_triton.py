"""The engine on Triton's kernels says what it says on the references, token for token."""

import pytest
import torch

from common.requests.sampling import SamplingParams
from engine.models import load
from kernels import device
from tests.support.checkpoints import make_checkpoint
from tests.support.steps import GREEDY, Steps, prompt

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PARAMS = [
    GREEDY,
    SamplingParams(max_tokens=9999, seed=8, temperature=0.8, top_k=20, top_p=0.95, min_p=0.01),
    SamplingParams(max_tokens=9999, seed=1, temperature=1.0, repetition_penalty=1.5),
]


def generate(model):
    """Two prompts in chunks, one that joins while they decode, in the same forward as they."""
    steps = Steps(model, num_slots=3)
    first, second, third = (
        steps.add(prompt(length, length), params)
        for length, params in zip((20, 3, 7), PARAMS, strict=True)
    )
    steps.prefill(first, chunk=16)
    steps.prefill(second)
    for _ in range(2):
        steps.decode(first, second)
    decodes = [(slot, int(steps.table.length[slot])) for slot in (first, second)]
    steps.launch([(third, 0, 7), *((slot, end - 1, end) for slot, end in decodes)])
    for _ in range(3):
        steps.decode(first, second, third)
    steps.settle()
    steps.close()
    return [steps.remove(slot) for slot in (first, second, third)]


@pytest.mark.long  # kernel by kernel: tests/kernels
@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "qwen2_moe"])
def test_kernels_and_references_give_the_same_tokens(tmp_path, monkeypatch, architecture):
    directory = make_checkpoint(tmp_path, architecture)
    answers = []
    for triton in (False, True):
        monkeypatch.setattr(device, "uses_triton", lambda tensor, triton=triton: triton)
        answers.append(generate(load(directory, DEVICE, torch.float32)))
    assert answers[0] == answers[1]
