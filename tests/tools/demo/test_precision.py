"""The demo model with fewer bits answers as well as in float32, within half a percentage point."""

from collections.abc import Iterator, Sequence
from random import Random

import pytest
import torch
from transformers import AutoTokenizer

from cli.demo import DIRECTORY
from engine.models import Model, load
from engine.models.linear import onednn
from kernels import device
from tests.support.engine.steps import Steps
from tests.support.hardware.devices import operators_here
from tools.demo.evaluate import CASES, Case
from tools.demo.rows import RowEncoder
from tools.demo.tasks import Exchange

HALF_A_POINT = 0.005
NUM_PROMPTS, NUM_LONG_PROMPTS = 60, 12  # of each task
BATCH_TOKENS = 16384
PAGE = 16
int8 = pytest.mark.skipif(not onednn.multiplies_int8(), reason="no int8 here")
FORMS = [
    pytest.param(torch.bfloat16, "none", id="bfloat16"),
    pytest.param(torch.bfloat16, "int8", id="int8", marks=int8),
]


def load_demo(dtype: torch.dtype, quantize: str) -> Model:
    return load(DIRECTORY, torch.device("cpu"), dtype, quantize)


@pytest.fixture(scope="module", autouse=True)
def _compiled_where_it_can_be() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "compiled_for", lambda where: operators_here())
        yield


@pytest.fixture(scope="module")
def exact() -> Model:
    return load_demo(torch.float32, "none")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DIRECTORY)


def num_right(model: Model, tokenizer, exchanges: Sequence[Exchange]) -> int:
    """Return how many greedy answers of the engine are right to their end."""
    encoder = RowEncoder(tokenizer)
    prompts, answers = encoder.prompts(exchanges), encoder.answers(exchanges)
    longest = max(map(len, answers))
    context = -(-(max(map(len, prompts)) + longest + 1) // PAGE) * PAGE
    num_slots = max(1, BATCH_TOKENS // context)
    steps = Steps(model, page_size=PAGE, num_slots=num_slots, context_length=context)
    right = 0
    for start in range(0, len(exchanges), num_slots):
        batch = slice(start, start + num_slots)
        slots = [steps.add(prompt) for prompt in prompts[batch]]
        ends = map(len, prompts[batch])
        steps.launch([(slot, 0, end) for slot, end in zip(slots, ends, strict=True)])
        for _ in range(longest - 1):
            steps.decode(*slots)
        steps.settle()
        for slot, prompt, answer in zip(slots, prompts[batch], answers[batch], strict=True):
            generated = steps.remove(slot)[len(prompt) :]
            right += generated[: len(answer)] == answer
    steps.close()
    return right


def drawn(case: Case) -> list[Exchange]:
    """Return about as many tokens of long prompts as of short ones, which are more prompts."""
    random = Random(f"precision {case.what}")
    is_long = any(f"{length} tokens" in case.what for length in (512, 2048, 3072))
    return [case.draw(random) for _ in range(NUM_LONG_PROMPTS if is_long else NUM_PROMPTS)]


@pytest.mark.long  # in float32: tests/tools/demo/test_weights.py
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype, quantize", FORMS)
def test_every_task_is_answered_as_well_as_in_float32(exact, tokenizer, dtype, quantize):
    other = load_demo(dtype, quantize)
    difference = total = 0
    for case in CASES:
        exchanges = drawn(case)
        right = num_right(other, tokenizer, exchanges)
        expected = num_right(exact, tokenizer, exchanges)
        print(f"{case.what}: {right} of {len(exchanges)}, in float32 {expected}")
        difference += expected - right
        total += len(exchanges)
    assert abs(difference) <= HALF_A_POINT * total
