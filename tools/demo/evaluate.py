"""Measure the accuracy of a demo model by task, and write accuracy.json beside it.

python -m tools.demo.evaluate [DIR]
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from cli.demo import DIRECTORY
from tools.demo import structured, tasks
from tools.demo.rows import RowEncoder, loss_and_right
from tools.demo.tasks import Exchange

ACCURACY = "accuracy.json"
SEED = 1000  # differs from the training seed, so that its prompts differ
_BATCH_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of prompt."""

    task: str
    what: str
    num_prompts: int
    draw: Callable[[Random], Exchange]


@dataclass(frozen=True, slots=True)
class EvaluationScore:
    """The model's score on one kind of prompt."""

    task: str
    what: str
    num_prompts: int
    num_right: int

    @property
    def rate(self) -> float:
        return self.num_right / self.num_prompts


def measure(directory: Path) -> list[EvaluationScore]:
    """Evaluate the greedy responses of the model in `directory`, computed in float32."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return [score(case, model, tokenizer) for case in CASES]


@torch.no_grad()
def score(
    case: Case, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> EvaluationScore:
    encoder = RowEncoder(tokenizer)
    random = Random(f"{SEED} {case.task} {case.what}")
    exchanges = [case.draw(random) for _ in range(case.num_prompts)]
    length = max(exchange.num_tokens for exchange in exchanges)
    num_rows = max(1, _BATCH_TOKENS // length)
    num_right = 0
    for start in range(0, len(exchanges), num_rows):
        batch = [[exchange] for exchange in exchanges[start : start + num_rows]]
        _, right = loss_and_right(model, encoder.rows(batch, length))
        num_right += int(right.sum())
    return EvaluationScore(case.task, case.what, case.num_prompts, num_right)


def write(scores: Sequence[EvaluationScore], directory: Path) -> None:
    """Write accuracy.json, with the hash of the evaluated weights."""
    weights = hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()
    rows = [{**asdict(score), "rate": score.rate} for score in scores]
    written = json.dumps({"weights_sha256": weights, "scores": rows}, indent=1)
    (directory / ACCURACY).write_text(written + "\n")


def show(scores: Sequence[EvaluationScore]) -> None:
    table = Table("task", "prompts", "asked", "right")
    for score in scores:
        table.add_row(score.task, score.what, str(score.num_prompts), f"{score.rate:.1%}")
    Console().print(table)


# Prompts.


def word_recall(random: Random, num_tokens: int) -> Exchange:
    """Ask for a known word. Its key may be anywhere in `num_tokens` tokens of facts."""
    return _asked(random, tasks.word_facts(random, num_tokens))


def _any_recall(random: Random, num_tokens: int) -> Exchange:
    return _asked(random, tasks.facts(random, num_tokens, tasks.any_word))


def _asked(random: Random, known: dict[str, str]) -> Exchange:
    key = random.choice(list(known))
    return tasks.recall(known, key, known[key])


def _copy_known(random: Random) -> Exchange:
    return tasks.copy(tasks.single_tokens(random, random.randint(1, 32)))


def _copy_any(random: Random) -> Exchange:
    return tasks.copy([tasks.any_word(random) for _ in range(random.randint(1, 12))])


def _reverse(random: Random) -> Exchange:
    return tasks.reverse(tasks.single_tokens(random, random.randint(1, tasks.MAX_REVERSED)))


def _add(random: Random, num_digits: int) -> Exchange:
    a, b = (random.randrange(10 ** (num_digits - 1), 10**num_digits) for _ in range(2))
    return tasks.add(a, b)


def _json_sum(random: Random) -> Exchange:
    return structured.sum_as_json(tasks.number(random), tasks.number(random))


def _call(random: Random) -> Exchange:
    return structured.called(f"tools {structured.TOOL}", *structured.sums(random))


def _result(random: Random) -> Exchange:
    return structured.tool_result(f"tools {structured.TOOL}", *structured.sums(random))


def _recall_with_tool(random: Random) -> Exchange:
    asked = word_recall(random, 64)
    return Exchange(f"tools {structured.TOOL}, {asked.prompt}", asked.answer)


CASES = (
    Case("recall", "2048 tokens of facts, known words", 500, partial(word_recall, num_tokens=2048)),
    Case("recall", "2048 tokens of facts, any words", 300, partial(_any_recall, num_tokens=2048)),
    Case("recall", "512 tokens of facts, any words", 500, partial(_any_recall, num_tokens=512)),
    Case("recall", "64 tokens of facts, any words", 1000, partial(_any_recall, num_tokens=64)),
    Case("recall", "3072 tokens: longer than trained", 100, partial(word_recall, num_tokens=3072)),
    Case("copy", "1 to 32 known words or letters", 1000, _copy_known),
    Case("copy", "1 to 12 words, also numbers and spelled ones", 1000, _copy_any),
    Case("reverse", f"1 to {tasks.MAX_REVERSED} known words or letters", 1000, _reverse),
    Case("add", "two numbers of 1 digit", 1000, partial(_add, num_digits=1)),
    Case("add", "two numbers of 2 digits", 1000, partial(_add, num_digits=2)),
    Case("add", "two numbers of 3 digits", 1000, partial(_add, num_digits=3)),
    Case("add", "a number of more digits: says that it cannot", 500, structured.too_large),
    Case("json", "a sum", 1000, _json_sum),
    Case("tool", "a sum of up to 6 digits: called", 1000, _call),
    Case("tool", "the result of a call: reported", 500, _result),
    Case("tool", "64 tokens of facts, known words: not called", 500, _recall_with_tool),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.demo.evaluate", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR", nargs="?", default=DIRECTORY)
    directory = parser.parse_args().directory
    disable_progress_bar()
    scores = measure(directory)
    show(scores)
    write(scores, directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
