"""Grammars of the tool call formats of model families, and helpers for structural tags.

All other text is content, except reasoning between markers at the start of a response, as in
DeepSeek-R1 and Qwen3. After the reasoning, another grammar parses the text.
"""

from collections.abc import Callable, Mapping
from typing import Any

from api.parsers.calls import CallReporter, call_object, json_arguments
from api.parsers.source import Emit, ParserSource, Steps, discard

THOUGHT = THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


def think(
    source: ParserSource,
    then: Callable[[ParserSource], Steps[None]],
    *,
    opened: bool,
    reasons: bool = True,
) -> Steps[None]:
    """Parse reasoning.

    Args:
        then: grammar of the text that follows.
        opened: the response begins within the reasoning, without an opening marker.
        reasons: reasoning is returned.
    """
    emit: Emit = source.reasoning if reasons else discard
    if (yield from source.accept(THINK_OPEN)) or opened:
        yield from source.spaces()
        yield from source.until(THINK_CLOSE, emit=emit, trim=True)
        yield from source.spaces()
    yield from then(source)


# Called with a ParserSource and the callable tools: the JSON schema of their arguments by name.
Grammar = Callable[[ParserSource, Mapping[str, Any]], Steps[None]]

HERMES = ("<tool_call>", "</tool_call>")
LLAMA3 = ("<|python_tag|>",)
MISTRAL = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)


def plain(source: ParserSource) -> Steps[None]:
    """Parse all text as content."""
    yield from source.rest(source.content)


def hermes(source: ParserSource, tools: Mapping[str, Any]) -> Steps[None]:
    """Parse `<tool_call>{"name": "f", "arguments": {}}</tool_call>`: Hermes, Qwen2.5 and Qwen3."""
    begin, end = HERMES
    while (yield from source.until(begin, emit=source.content, trim=True)):
        source.record()
        if not (yield from call_object(source)):
            source.content(source.trimmed + begin + source.recorded())
            continue
        yield from source.accept(end)
        yield from source.spaces()


def llama3(source: ParserSource, tools: Mapping[str, Any]) -> Steps[None]:
    """Parse `{"name": "f", "parameters": {}}` as the whole response, or after `<|python_tag|>`.

    Several calls are separated by `;`. A response that is other JSON is content.
    """
    (tag,) = LLAMA3
    source.record()
    if not (yield from source.accept(tag)):
        yield from source.spaces()
    while True:
        if not (yield from call_object(source, tools)):
            source.content(source.recorded())
            break
        if not (yield from source.accept(";", ",")):
            yield from source.spaces()
            break
        source.record()
    yield from source.rest(source.content)


def mistral(source: ParserSource, tools: Mapping[str, Any]) -> Steps[None]:
    """Parse `[TOOL_CALLS][{"name": "f", "arguments": {}}]`, or newer `[TOOL_CALLS]f[ARGS]{}`."""
    begin, call_id, arguments = MISTRAL
    while (yield from source.until(begin, emit=source.content, trim=True)):
        source.record()
        if (yield from source.accept("[")):
            while (yield from call_object(source)):
                if not (yield from source.accept(",")):
                    break
                source.record()
            else:
                source.content(source.recorded())
            yield from source.accept("]")
        else:
            name, marker = yield from source.collected(call_id, arguments, "{")
            if not marker:
                return  # truncated
            if marker == call_id:
                yield from source.collected(arguments)
            elif marker == "{":
                source.put_back(marker)
            yield from _named(source, name)
        yield from source.spaces()


def deepseek(source: ParserSource, tools: Mapping[str, Any]) -> Steps[None]:
    """Parse DeepSeek's calls, which have markers for each part.

    V3 and R1 write the kind of tool, its name and a block of JSON. V3.1 writes the name and JSON.
    """
    calls_begin, begin, middle, end, calls_end = DEEPSEEK
    while (yield from source.until(calls_begin, emit=source.content, trim=True)):
        while (yield from source.accept(begin)):
            source.record()
            before, _ = yield from source.collected(middle)
            behind, brace = yield from source.collected("{", end)
            if not brace:
                return  # truncated
            source.put_back(brace)
            of_v3 = before.strip() == "function" and behind.strip()
            yield from _named(source, behind.partition("\n")[0] if of_v3 else before)
            yield from source.collected(end)
        yield from source.accept(calls_end)
        yield from source.spaces()


def forced(source: ParserSource) -> Steps[None]:
    """Parse `[{"name": "f", "parameters": {}}]`, which a grammar makes the whole response."""
    yield from source.accept("[")
    while (yield from call_object(source)):
        if not (yield from source.accept(",")):
            break
    yield from source.rest(discard)


def _named(source: ParserSource, name: str) -> Steps[None]:
    """Report a call whose name has been parsed, and parse its arguments."""
    if not name.strip():
        source.content(source.recorded())
        return
    call = CallReporter(source)
    call.name(name.strip())
    yield from json_arguments(source, call)
    call.end()


Format = Mapping[str, Any]

ANYTHING: Format = {"type": "regex", "pattern": r"[\s\S]*"}  # also works beside tokens
SPACE: Format = {"type": "regex", "pattern": r"\s?"}


# Text in a structural tag has no special tokens, so a marker that is a special token is referred to
# by its id.
class Forms:
    """Builds structural tag formats for one model."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens

    def sequence(self, *elements: str | Format) -> Format:
        """Return a sequence of markers, other texts and formats."""
        return {"type": "sequence", "elements": [self.element(each) for each in elements]}

    def element(self, element: str | Format) -> Format:
        """Return the format of one marker or text. A format is returned unchanged."""
        if not isinstance(element, str):
            return element
        if element in self._tokens:
            return {"type": "token", "token": self._tokens[element]}
        return {"type": "const_string", "value": element}


def one_of(*elements: Format) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def star(content: Format) -> Format:
    return {"type": "star", "content": content}


def plus(content: Format) -> Format:
    return {"type": "plus", "content": content}


def optional(content: Format) -> Format:
    return {"type": "optional", "content": content}


def schema_form(schema: Mapping[str, Any], style: str = "json") -> Format:
    """Return the format of arguments with this schema. `style`: json, qwen_xml or glm_xml."""
    return {"type": "json_schema", "json_schema": schema, "style": style}
