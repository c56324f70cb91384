"""A character of a response costs a parser the same, however many preceded it."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from api.parsers import formats, harmony, marked
from api.parsers.source import GrammarParser, ParserSource, Steps

TOOLS: Mapping[str, Any] = {"f": {"type": "object", "properties": {"a": {"type": "string"}}}}

GRAMMARS: Mapping[str, tuple[Callable[[ParserSource], Steps[None]], tuple[str, ...]]] = {
    "hermes": (lambda source: formats.hermes(source, TOOLS), formats.HERMES),
    "llama3": (lambda source: formats.llama3(source, TOOLS), formats.LLAMA3),
    "mistral": (lambda source: formats.mistral(source, TOOLS), formats.MISTRAL),
    "deepseek": (lambda source: formats.deepseek(source, TOOLS), formats.DEEPSEEK),
    "qwen3-coder": (lambda source: marked.qwen3_coder(source, TOOLS), marked.QWEN3_CODER),
    "glm45": (lambda source: marked.glm45(source, TOOLS), marked.GLM45),
    "forced": (formats.forced, ()),
    "harmony": (
        lambda source: harmony.harmony(source, reasons=True, calls=True),
        (*harmony.MARKERS, *harmony.ENDS),
    ),
    "think": (
        lambda source: formats.think(source, formats.plain, opened=False),
        (formats.THINK_OPEN, formats.THINK_CLOSE),
    ),
}
UNITS = [" ", "\n", "{", "[", '"', "<", ";", "x"]
LONGEST = 32  # characters of a marker


def _begins(markers: tuple[str, ...]) -> Iterator[str]:
    """Yield texts that lead a grammar to each of its states."""
    yield from ("", *markers)
    for begin in ("", *markers[:1]):
        yield from (begin + "".join(markers[1:2]), begin + "f" + "".join(markers[1:2]))
        yield from (begin + '{"name": "f"', begin + '[{"name": "f", "arguments": {}}', begin + "f")


@pytest.mark.parametrize("name", GRAMMARS)
def test_pending_text_is_no_longer_than_the_start_of_a_marker(name):
    """Each character scans the pending text again. 40,000 spaces took 2.3 s."""
    grammar, markers = GRAMMARS[name]
    for begin in _begins(markers):
        for unit in (*UNITS, *markers, *(marker[:-1] for marker in markers)):
            source = ParserSource()
            steps = grammar(source)
            source.feed(begin, ())
            for _ in range(60):
                if next(steps, steps) is steps:
                    break
                assert len(source) < LONGEST, (begin, unit)
                source.feed(unit, ())


def test_a_grammar_that_has_ended_keeps_no_text():
    """Harmony's grammar ends where no other message follows."""
    sources: list[ParserSource] = []

    def grammar(source: ParserSource) -> Steps[None]:
        sources.append(source)
        yield from harmony.harmony(source, reasons=True, calls=True)

    parser = GrammarParser(grammar)
    for text in ("<|channel|>final<|message|>x<|end|>", *["more "] * 100):
        parser.parse(text, last=False)
    assert len(sources[0]) < LONGEST


def test_the_arguments_of_a_call_are_joined_once():
    """Not with each of their parts: of a whole answer all are parsed at once."""

    class Parts(str):
        def __radd__(self, other: str) -> str:
            raise AssertionError("what came before a part is copied with it")

    def grammar(source: ParserSource) -> Steps[None]:
        source.call("f")
        for part in "xxxx":
            source.arguments(Parts(part))
        source.content(Parts("y"))
        source.content(Parts("z"))
        yield

    parsed = GrammarParser(grammar).parse("", last=False)
    assert (parsed.content, [call.arguments for call in parsed.calls]) == ("yz", ["xxxx"])


def test_a_brace_that_starts_no_call_is_reported_once():
    parser = GrammarParser(lambda source: formats.mistral(source, TOOLS))
    assert parser.parse('[TOOL_CALLS]{"a": 1}', last=True).content == '{"a": 1}'
