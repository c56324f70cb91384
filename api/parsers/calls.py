"""Streaming parser of tool calls that models write as JSON."""

import json
from collections.abc import Container

from api.parsers.source import ParserSource, Steps, discard

_ARGUMENTS = ("arguments", "parameters")


class CallReporter:
    """Reports one tool call.

    The name is reported before the arguments, whatever their order in the text.
    """

    def __init__(self, source: ParserSource) -> None:
        self._source = source
        self._held: list[str] = []  # arguments that arrived before the name
        self.named = False
        self._has_arguments = False

    def name(self, name: str) -> None:
        self.named = True
        self._source.call(name)
        self.arguments("".join(self._held))

    def arguments(self, text: str) -> None:
        if not self.named:
            self._held.append(text)
        elif text:
            self._has_arguments = True
            self._source.arguments(text)

    def end(self) -> None:
        """End the call. One without arguments gets an empty object, because clients decode them."""
        if self.named and not self._has_arguments:
            self.arguments("{}")


def call_object(source: ParserSource, known: Container[str] | None = None) -> Steps[bool]:
    """Parse `{"name": ..., "arguments": {...}}`, with keys in any order, and report the call.

    Args:
        known: names of tools. The object is a call only if it names one of them and has only keys
            of a call. None: any object is a call.

    Returns:
        Whether it is a call. If not, nothing has been reported.
    """
    call = CallReporter(source)
    if not (yield from source.accept("{")):
        return False
    while not (yield from source.accept("}")):
        key = yield from _text(source)
        if not key or not (yield from source.accept(":")):
            break
        if key == "name":
            name = yield from _text(source)
            if not name or call.named or (known is not None and name not in known):
                break
            call.name(name)
        elif key in _ARGUMENTS:
            yield from json_arguments(source, call)
        elif known is None or key in ("type", "id"):
            yield from _skip_value(source)
        else:
            break
        yield from source.accept(",")
    else:
        call.end()
    return call.named


def json_arguments(source: ParserSource, call: CallReporter) -> Steps[None]:
    """Parse and report arguments: an object, or a JSON string with an object, as it arrives."""
    yield from source.spaces()
    if (yield from source.next_is("{[")):
        yield from source.through(_ValueScan(), call.arguments)
    elif (yield from source.next_is('"')):
        call.arguments((yield from _text(source)) or "{}")
    else:
        yield from _skip_value(source)


def _skip_value(source: ParserSource) -> Steps[None]:
    """Parse a value of any type."""
    yield from source.spaces()
    yield from source.through(_ValueScan(), discard)


def _text(source: ParserSource) -> Steps[str]:
    """Parse a JSON string. Return "" if there is none."""
    yield from source.spaces()
    if not (yield from source.next_is('"')):
        return ""
    parts: list[str] = []
    yield from source.through(_ValueScan(), parts.append)
    try:
        return str(json.loads("".join(parts), strict=False))
    except ValueError:
        return ""


class _ValueScan:
    """A Scan that finds the end of a JSON value by its brackets and quotes."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_text = False
        self._escaped = False

    def __call__(self, text: str, start: int) -> int | None:
        for index in range(start, len(text)):
            character = text[index]
            if self._in_text:
                if self._ends_text(character) and not self._depth:
                    return index + 1
            elif character == '"':
                self._in_text = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return index + 1 + min(self._depth, 0)
            elif not self._depth and (character == "," or character.isspace()):
                return index
        return None

    def _ends_text(self, character: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_text = False
            return True
        return False
