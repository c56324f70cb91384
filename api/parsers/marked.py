"""Parsers of tool calls of Qwen3-Coder and GLM-4.5: each argument is text between markers.

Only the tool's schema says which arguments are numbers.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from api.parsers.calls import CallReporter
from api.parsers.source import ParserSource, Steps

_WORDS = {"True": "true", "False": "false", "None": "null"}  # written by models that know Python
_ANY = frozenset({"string", "number", "boolean", "null", "object", "array"})


# If the text is JSON of a type that the schema allows, the value is that JSON, otherwise a string.
class ArgumentTypes:
    """Converts one tool's arguments from plain text to JSON, by the tool's schema."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._schema = parameters
        self._known: dict[str, frozenset[str]] = {}  # types by argument

    def are_text(self, name: str) -> bool:
        """Return whether an argument can only be a string."""
        return self._of(name) == {"string"}

    def as_json(self, name: str, text: str) -> str:
        """Return the JSON of an argument's text."""
        stripped = text.strip()
        written = _WORDS.get(stripped, stripped)
        try:
            value = msgspec.json.decode(written)
        except (ValueError, RecursionError):
            return quoted(text)
        return written if _type_of(value) in self._of(name) else quoted(text)

    def _of(self, name: str) -> frozenset[str]:
        """Return the JSON types that an argument may have."""
        if name not in self._known:
            properties = self._schema.get("properties")
            said = properties.get(name) if isinstance(properties, Mapping) else None
            self._known[name] = self._allowed(said)
        return self._known[name]

    def _allowed(self, schema: Any) -> frozenset[str]:
        found: set[str] = set()
        followed: set[str] = set()
        waiting = [schema]
        while waiting:
            match waiting.pop():
                case {"$ref": str(reference)}:
                    if reference not in followed:
                        followed.add(reference)
                        waiting.append(self._meant(reference))
                case {"type": str(name)}:
                    found.add(_plain(name))
                case {"type": [*names]}:
                    found.update(map(_plain, names))
                case {"const": value}:
                    found.add(_type_of(value))
                case {"enum": [*values]}:
                    found.update(map(_type_of, values))
                case {"anyOf": [*branches]} | {"oneOf": [*branches]}:
                    waiting += branches
                case _:
                    return _ANY
        return frozenset(found)

    def _meant(self, reference: str) -> Any:
        """Return the target of a reference within the schema, None if it does not exist."""
        found: Any = self._schema
        for step in reference.removeprefix("#").split("/")[1:]:
            found = found.get(step) if isinstance(found, Mapping) else None
        return found


def quoted(text: str) -> str:
    """Return a text as JSON."""
    return msgspec.json.encode(text).decode()


def _plain(name: object) -> str:
    return "number" if name == "integer" else str(name)


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


QWEN3_CODER = (
    "<tool_call>",
    "<function=",
    "<parameter=",
    "</parameter>",
    "</function>",
    "</tool_call>",
)
GLM45 = ("<tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>")


def qwen3_coder(source: ParserSource, tools: Mapping[str, Any]) -> Steps[None]:
    """Parse `<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`.

    There are line breaks around every part. Models may omit the first marker.
    """
    begin, function, parameter, parameter_end, function_end, end = QWEN3_CODER
    while marker := (yield from source.until(begin, function, emit=source.content, trim=True)):
        before = source.trimmed + marker
        source.record()
        meant = marker == begin
        if meant and not (yield from source.accept(function)):
            source.content(before + source.recorded())
            continue
        name, closed = yield from source.collected(">")
        if not closed or not (meant or name in tools):
            source.content(before + source.recorded())
            continue
        call = _MarkedCall(source, name.strip(), tools)
        while (yield from source.accept(parameter)):
            key, _ = yield from source.collected(">")
            yield from source.take("\n")
            yield from call.argument(key, f"\n{parameter_end}", parameter_end)
        call.end()
        yield from source.accept(function_end)
        yield from source.accept(end)
        yield from source.spaces()


def glm45(source: ParserSource, tools: Mapping[str, Any]) -> Steps[None]:
    """Parse `<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`."""
    begin, key_begin, key_end, value_begin, value_end, end = GLM45
    while (yield from source.until(begin, emit=source.content, trim=True)):
        before = source.trimmed + begin
        source.record()
        name, marker = yield from source.collected(key_begin, end)
        if not marker or not name.strip():
            source.content(before + source.recorded())
            continue
        call = _MarkedCall(source, name.strip(), tools)
        while marker == key_begin:
            key, _ = yield from source.collected(key_end)
            yield from source.accept(value_begin)
            yield from call.argument(key.strip(), value_end)
            marker = yield from source.accept(key_begin, end)
        call.end()
        yield from source.spaces()


class _MarkedCall:
    """Reports one call, whose arguments come one by one, as a JSON object."""

    def __init__(self, source: ParserSource, name: str, tools: Mapping[str, Any]) -> None:
        self._source = source
        self._types = ArgumentTypes(tools.get(name) or {})
        self._call = CallReporter(source)
        self._separator = "{"
        self._whole = True
        self._call.name(name)

    def argument(self, name: str, *ends: str) -> Steps[None]:
        """Parse an argument up to the first of `ends`.

        An argument that can only be a string is reported as it arrives.
        """
        self._call.arguments(f"{self._separator}{quoted(name)}: ")
        self._separator = ", "
        if self._types.are_text(name):
            self._call.arguments('"')
            self._whole = bool((yield from self._source.until(*ends, emit=self._more_text)))
            if self._whole:
                self._call.arguments('"')
            return
        text, end = yield from self._source.collected(*ends)
        self._whole = bool(end)
        if self._whole:
            self._call.arguments(self._types.as_json(name, text))

    def end(self) -> None:
        """End the call. If an argument was truncated, its JSON stays incomplete."""
        if self._whole:
            self._call.arguments("{}" if self._separator == "{" else "}")

    def _more_text(self, text: str) -> None:
        self._call.arguments(quoted(text)[1:-1])
