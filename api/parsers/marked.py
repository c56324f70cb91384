"""Parsers of Qwen3-Coder's and GLM-4.5's tool calls: each argument is plain text between markers.

Only the tools' schemas say which arguments are numbers.
"""

from collections.abc import Mapping
from typing import Any

from api.parsers.argument_types import ArgumentTypes, quoted
from api.parsers.calls import ToolCallEvents
from api.parsers.source import ParserSource, Steps

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
    while marker := (yield from source.until(begin, function, tell=source.content, trim=True)):
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
    while (yield from source.until(begin, tell=source.content, trim=True)):
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
    """Reporter of one call whose arguments come one by one. Reports them as a JSON object."""

    def __init__(self, source: ParserSource, name: str, tools: Mapping[str, Any]) -> None:
        self._source = source
        self._types = ArgumentTypes(tools.get(name) or {})
        self._call = ToolCallEvents(source)
        self._separator = "{"
        self._whole = True
        self._call.name(name)

    def argument(self, name: str, *ends: str) -> Steps[None]:
        """Parse an argument up to the first of `ends`.

        One that can only be a string is reported as it arrives.
        """
        self._call.arguments(f"{self._separator}{quoted(name)}: ")
        self._separator = ", "
        if self._types.are_text(name):
            self._call.arguments('"')
            self._whole = bool((yield from self._source.until(*ends, tell=self._more_text)))
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
