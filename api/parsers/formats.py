"""How families of models write calls of tools, one grammar each. What is no call is content."""

from collections.abc import Callable, Mapping
from typing import Any

from api.parsers.calls import CallTelling, call_object, json_arguments
from api.parsers.source import Source, Steps, nobody

# Of a Source, and the tools that may be called: by name the JSON schema of their arguments.
Grammar = Callable[[Source, Mapping[str, Any]], Steps[None]]

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


def plain(source: Source) -> Steps[None]:
    """Content, all of it."""
    yield from source.rest(source.content)


def hermes(source: Source, tools: Mapping[str, Any]) -> Steps[None]:
    """`<tool_call>{"name": "f", "arguments": {}}</tool_call>`, of Hermes, Qwen2.5 and Qwen3."""
    begin, end = HERMES
    while (yield from source.until(begin, tell=source.content, trim=True)):
        source.record()
        if not (yield from call_object(source)):
            source.content(source.trimmed + begin + source.recorded())
            continue
        yield from source.accept(end)
        yield from source.spaces()


def llama3(source: Source, tools: Mapping[str, Any]) -> Steps[None]:
    """`{"name": "f", "parameters": {}}` as the whole answer, or behind `<|python_tag|>`; several
    with `;` between them. An answer that is other JSON is content."""
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


def mistral(source: Source, tools: Mapping[str, Any]) -> Steps[None]:
    """`[TOOL_CALLS][{"name": "f", "arguments": {}}]`, and `[TOOL_CALLS]f[ARGS]{}` of newer ones."""
    begin, call_id, arguments = MISTRAL
    while (yield from source.until(begin, tell=source.content, trim=True)):
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
                return  # cut off
            if marker == call_id:
                yield from source.collected(arguments)
            elif marker == "{":
                source.put_back(marker)
            yield from _named(source, name)
        yield from source.spaces()


def deepseek(source: Source, tools: Mapping[str, Any]) -> Steps[None]:
    """Markers of their own for everything: of V3 and R1 the kind of tool, then its name and a block
    of JSON; of V3.1 the name, then the JSON."""
    calls_begin, begin, middle, end, calls_end = DEEPSEEK
    while (yield from source.until(calls_begin, tell=source.content, trim=True)):
        while (yield from source.accept(begin)):
            source.record()
            before, _ = yield from source.collected(middle)
            behind, brace = yield from source.collected("{", end)
            if not brace:
                return  # cut off
            source.put_back(brace)
            of_v3 = before.strip() == "function" and behind.strip()
            yield from _named(source, behind.partition("\n")[0] if of_v3 else before)
            yield from source.collected(end)
        yield from source.accept(calls_end)
        yield from source.spaces()


def forced(source: Source) -> Steps[None]:
    """`[{"name": "f", "parameters": {}}]`, where a grammar makes all of the answer calls."""
    yield from source.accept("[")
    while (yield from call_object(source)):
        if not (yield from source.accept(",")):
            break
    yield from source.rest(nobody)


def _named(source: Source, name: str) -> Steps[None]:
    """Tells a call of which the name has been taken, and the arguments have not."""
    if not name.strip():
        source.content(source.recorded())
        return
    call = CallTelling(source)
    call.name(name.strip())
    yield from json_arguments(source, call)
    call.end()
