"""The committed weights are small, load everywhere, and have the documented accuracy."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cli.demo import DIRECTORY
from engine.models import load
from tests.support.engine.steps import Steps
from tests.support.models.checkpoints import reference_model
from tools.demo import evaluate

ROOT = Path(__file__).resolve().parents[3]
MAX_PARAMETERS = 2_000_000
MAX_BYTES = 4 * 1000 * 1000
LONGEST = 24  # tokens of an answer to the prompts here


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DIRECTORY)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def answer(model, tokenizer) -> Callable[[str], str]:
    def answer_to(prompt: str) -> str:
        ids = tokenizer(prompt, return_tensors="pt")
        with torch.no_grad():
            out = model.generate(
                ids.input_ids,
                attention_mask=ids.attention_mask,
                max_new_tokens=LONGEST,
                do_sample=False,
            )
        generated = out[0, ids.input_ids.shape[1] :]
        assert generated[-1] == tokenizer.eos_token_id
        return tokenizer.decode(generated, skip_special_tokens=True).strip()

    return answer_to


def _documented() -> list[tuple[str, str]]:
    """Return the prompts and responses of the table in the quick start."""
    page = (ROOT / "docs/quickstart.md").read_text()
    return re.findall(r"^\| `(.* =)` \| `([^`]*)`", page, re.MULTILINE)


def test_the_file_is_small(model):
    assert sum(parameter.numel() for parameter in model.parameters()) <= MAX_PARAMETERS
    assert sum(path.stat().st_size for path in DIRECTORY.iterdir()) <= MAX_BYTES


def test_the_documented_accuracy_belongs_to_these_weights_and_suffices():
    written = json.loads((DIRECTORY / evaluate.ACCURACY).read_text())
    weights = (DIRECTORY / "model.safetensors").read_bytes()
    assert written["weights_sha256"] == hashlib.sha256(weights).hexdigest()
    rates = {(score["task"], score["what"]): score["rate"] for score in written["scores"]}
    assert set(rates) == {(case.task, case.what) for case in evaluate.CASES}
    for (task, what), rate in rates.items():
        bar = 0.9 if task == "json" else 0.99 if "known words" in what else 0.95
        assert rate >= bar or "longer than trained" in what, what


@pytest.mark.long
def test_the_documented_accuracy_is_reproduced(tokenizer, model):
    (short,) = (case for case in evaluate.CASES if case.what == "64 tokens of facts, any words")
    again = evaluate.score(short, model, tokenizer)
    written = json.loads((DIRECTORY / evaluate.ACCURACY).read_text())["scores"]
    (rate,) = (score["rate"] for score in written if score["what"] == short.what)
    assert abs(again.rate - rate) <= 0.005


@pytest.mark.parametrize("prompt, expected", _documented())
def test_responses_of_the_quick_start_are_reproduced(answer, prompt, expected):
    assert answer(prompt) == expected


def test_the_quick_start_shows_every_task():
    prompts = [prompt for prompt, _ in _documented()]
    for start in ("add ", "copy ", "reverse "):
        assert any(prompt.startswith(start) for prompt in prompts)
    assert any(prompt.count("=") > 1 for prompt in prompts)


def test_a_conversation_uses_its_earlier_turns(answer, tokenizer):
    chat = [
        {"role": "user", "content": "anna = paris, bob = rome, bob"},
        {"role": "assistant", "content": "rome"},
        {"role": "user", "content": "add 27 15"},
        {"role": "assistant", "content": "42"},
        {"role": "user", "content": "anna"},
    ]
    assert answer(tokenizer.apply_chat_template(chat, tokenize=False)) == "paris"


def test_the_engine_answers_like_transformers(tokenizer):
    steps = Steps(load(DIRECTORY, torch.device("cpu"), torch.float32))
    reference = reference_model(DIRECTORY)
    for prompt, _ in _documented():
        ids = tokenizer(prompt).input_ids
        with torch.no_grad():
            expected = reference.generate(
                torch.tensor([ids]), max_new_tokens=LONGEST, do_sample=False, pad_token_id=0
            )
        assert ids + steps.generate([ids], LONGEST, chunk=16)[0] == expected[0].tolist()
    steps.close()
