"""Structured prompts of the demo model: responses as JSON, and tool calls.

The model is good at sums of short numbers. It refuses sums of longer numbers unless a tool that
adds is declared. Then it calls the tool for every sum, and repeats its result.
"""

import json
import math
from random import Random

from tools.demo import tasks
from tools.demo.tasks import Exchange
from tools.demo.tokenizer import CALL, CALL_END

TOOL = "add"  # its arguments are two integers, `a` and `b`
TOO_LARGE = "too large"  # response to sums of numbers with more than tasks.MAX_DIGITS digits
MAX_CALL_DIGITS = 6


def sum_as_json(a: int, b: int) -> Exchange:
    """Return the prompt `json add 27 15 =` with its response."""
    asked = tasks.add(a, b)
    return Exchange(f"json {asked.prompt}", json.dumps({"answer": a + b}), exact=True)


def call(a: int, b: int) -> str:
    """Return a tool call in the format of Hermes and Qwen.

    A line break precedes the braces, because a grammar requires one.
    """
    arguments = json.dumps({"name": TOOL, "arguments": {"a": a, "b": b}})
    return f"{CALL}\n{arguments}\n{CALL_END}"


def called(tools: str, a: int, b: int) -> Exchange:
    """Return a sum with declared tools, one of which is TOOL."""
    return Exchange(f"{tools}, add {a} {b} =", call(a, b), exact=True)


def tool_result(tools: str, a: int, b: int) -> Exchange:
    """Return the turn after a call, with the whole conversation in the chat template."""
    said = call(a, b).replace("\n", "")
    return Exchange(f"{tools}, add {a} {b} = {said} result {a + b} =", str(a + b))


def too_large(random: Random) -> Exchange:
    """Return a sum with at least one long number, and without a tool."""
    numbers = [_long_number(random), _any_number(random)]
    random.shuffle(numbers)
    a, b = numbers
    return Exchange(f"add {a} {b} =", TOO_LARGE)


def tool_names(random: Random, *, adds: bool) -> str:
    """Return `tools fox add owl`: the chat template's declaration of up to three tools."""
    names = [tasks.known_word(random) for _ in range(random.choice((0, 0, 1, 2)) + (not adds))]
    if adds:
        names.insert(random.randint(0, len(names)), TOOL)
    return " ".join(("tools", *names))


def sums(random: Random) -> tuple[int, int]:
    """Return numbers for the tool to add, including short ones."""
    return _any_number(random), _any_number(random)


def json_answers(random: Random, num_tokens: int) -> list[Exchange]:
    """Return sums to be answered as JSON, with some plain sums between them."""
    found = []
    left = num_tokens
    while left > 0:
        ask = sum_as_json if random.random() < 0.8 else tasks.add
        found.append(ask(tasks.number(random), tasks.number(random)))
        left -= found[-1].num_tokens
    return found


def calls(random: Random, num_tokens: int) -> list[Exchange]:
    """Return a sum or a question with declared tools, and sums that need a tool.

    Each is a separate conversation, because a declaration of tools changes all later turns.
    """
    draw = random.choices((_tool, _without_tool), (2, 1))[0]
    return draw(random, num_tokens)


def _tool(random: Random, num_tokens: int) -> list[Exchange]:
    tools = tool_names(random, adds=True)
    draw = random.random()
    if draw < 0.5:
        return [called(tools, *sums(random))]
    if draw < 0.8:
        return [tool_result(tools, *sums(random))]
    return _begun(tools, tasks.recalls(random, num_tokens // 2, tasks.known_word)[:1])


def _without_tool(random: Random, num_tokens: int) -> list[Exchange]:
    asked = [too_large(random), tasks.add(tasks.number(random), tasks.number(random))]
    random.shuffle(asked)
    return asked if random.random() < 0.5 else _begun(tool_names(random, adds=False), asked)


def _begun(tools: str, conversation: list[Exchange]) -> list[Exchange]:
    first, *others = conversation
    return [Exchange(f"{tools}, {first.prompt}", first.answer), *others]


def _any_number(random: Random) -> int:
    return random.randrange(10 ** random.randint(1, MAX_CALL_DIGITS))


def _long_number(random: Random) -> int:
    least = 10**tasks.MAX_DIGITS
    return int(math.exp(random.uniform(math.log(least), math.log(10**MAX_CALL_DIGITS))))
