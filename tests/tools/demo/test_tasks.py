"""Every task's answer is true according to its prompt alone."""

import json
from random import Random

import pytest

from tools.demo import evaluate, structured, tasks
from tools.demo.rows import RowEncoder
from tools.demo.tokenizer import make_tokenizer
from tools.demo.words import LETTERS, WORDS

SEEDS = range(10)


def _answer_by_reading(prompt: str, before: dict[str, str]) -> str:
    """Return the answer by parsing: lists, sums, and otherwise facts and a key.

    Args:
        before: facts of the conversation so far. Those of this prompt are added.
    """
    if prompt.startswith("tools"):
        tools, _, prompt = prompt.partition(", ")
        if "result" in prompt:
            return prompt.split()[-2]
        if structured.TOOL in tools.split()[1:] and prompt.startswith("add "):
            called = {
                "name": "add",
                "arguments": dict(zip("ab", map(int, prompt.split()[1:3]), strict=True)),
            }
            return f"<tool_call>\n{json.dumps(called)}\n</tool_call>"
    *reported, asked = prompt.removesuffix(" =").split(", ")
    for fact in reported:
        key, value = fact.split(" = ")
        assert key not in before or before[key] == value
        before[key] = value
    match asked.split():
        case ["add", a, b]:
            return "too large" if max(len(a), len(b)) > 3 else str(int(a) + int(b))
        case ["json", "add", a, b]:
            return json.dumps({"answer": int(a) + int(b)})
        case ["copy", *words]:
            return " ".join(words)
        case ["reverse", *words]:
            return " ".join(reversed(words))
    return before[asked]


@pytest.mark.parametrize("word", [tasks.known_word, tasks.any_word])
@pytest.mark.parametrize("num_tokens", [32, 300, 2048])
def test_answers_in_training_are_true(word, num_tokens):
    for seed in SEEDS:
        random = Random(seed)
        for conversation in (
            tasks.recalls(random, num_tokens, word),
            tasks.copies(random, num_tokens, word),
            tasks.sums_and_lists(random, num_tokens),
            structured.json_answers(random, 128),
            *(structured.calls(random, 96) for _ in range(10)),
        ):
            before: dict[str, str] = {}
            for exchange in conversation:
                assert exchange.answer == _answer_by_reading(exchange.prompt, before)


@pytest.mark.parametrize("case", evaluate.CASES, ids=lambda case: f"{case.task} {case.what}")
def test_answers_in_evaluation_are_true(case):
    random = Random(0)
    for _ in SEEDS:
        exchange = case.draw(random)
        assert exchange.answer == _answer_by_reading(exchange.prompt, {})
        if "2048" in case.what:
            assert 2000 < exchange.num_tokens < 2100


def test_the_token_count_of_a_conversation_equals_the_tokenizers():
    tokenizer = make_tokenizer()
    random = Random(0)
    conversation = [
        *tasks.recalls(random, 300, tasks.any_word),
        *tasks.copies(random, 300, tasks.any_word),
        *tasks.sums_and_lists(random, 300),
    ]
    for exchange in conversation:
        answered = f"{exchange.prompt} {exchange.answer}{tokenizer.eos_token}"
        assert exchange.num_tokens == len(tokenizer(answered).input_ids)
    encoder = RowEncoder(tokenizer)
    for exchange in [
        *structured.json_answers(random, 300),
        *(one for _ in range(50) for one in structured.calls(random, 96)),
    ]:
        tokens = encoder.rows([[exchange]], 2 * exchange.num_tokens).tokens
        assert exchange.num_tokens == int((tokens != tokenizer.pad_token_id).sum())


def test_a_conversation_asks_for_keys_from_all_of_its_facts():
    places = set()
    for seed in range(200):
        first = tasks.recalls(Random(seed), 64, tasks.known_word)[0]
        keys = [fact.split(" = ")[0] for fact in first.prompt.split(", ")[:-1]]
        asked = first.prompt.split(", ")[-1].removesuffix(" =")
        places.add(round(3 * keys.index(asked) / len(keys)))
    assert places >= {0, 1, 2}


def test_there_are_500_words_each_in_one_category():
    assert len(WORDS) == 500
    assert len({*WORDS, *LETTERS, "add", "copy", "reverse"}) == 529
