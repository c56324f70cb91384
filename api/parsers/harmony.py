"""Parser and structural tags for Harmony, the format of gpt-oss: messages to channels."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from api.parsers.calls import CallReporter
from api.parsers.formats import ANYTHING, Format, Forms, one_of, optional, star
from api.parsers.source import Emit, ParserSource, Steps, discard

MARKERS = START, CHANNEL, CONSTRAIN, MESSAGE = (
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
)
ENDS = END, *_ = ("<|end|>", "<|call|>", "<|return|>")
THINKING = "analysis"

_THINKING = re.compile(rf"\s*{THINKING}\b")
_NAME = r"[^\s<]+"
_RECIPIENT = re.compile(rf"to=functions\.({_NAME})")


def harmony(source: ParserSource, *, reasons: bool, calls: bool) -> Steps[None]:
    """Parse a Harmony response.

    Args:
        reasons: reasoning is returned.
        calls: functions may be called. If not, a call is content.
    """
    author, marker = yield from source.collected(CHANNEL, MESSAGE, START, *ENDS)
    if marker not in (CHANNEL, MESSAGE):  # the response begins within a message, or has none
        source.content(author)
    while marker:
        channel = ""
        if marker == CHANNEL:
            channel, marker = yield from source.collected(MESSAGE, START, *ENDS)
        if marker == MESSAGE:
            recipient = _RECIPIENT.search(author) or _RECIPIENT.search(channel)
            marker = yield from _message(source, channel, recipient if calls else None, reasons)
        if marker in ENDS:
            marker = yield from source.accept(START)
        if marker == START:
            author, marker = yield from source.collected(CHANNEL, MESSAGE, START, *ENDS)


def _message(
    source: ParserSource, channel: str, recipient: re.Match[str] | None, reasons: bool
) -> Steps[str]:
    """Report one message, and return the marker at its end."""
    if recipient is None:
        emit: Emit = source.content
        if _THINKING.match(channel):
            emit = source.reasoning if reasons else discard
        return (yield from source.until(START, *ENDS, emit=emit))
    call = CallReporter(source)
    call.name(recipient[1])
    marker = yield from source.until(START, *ENDS, emit=call.arguments, trim=True)
    call.end()
    return marker


def is_open(rendered_end: str) -> bool:
    """Return whether a response begins with a message header, after a prompt with this end."""
    return rendered_end.rstrip().endswith(f"{START}assistant")


def can_call(name: str) -> bool:
    """Return whether a tool's name can be written in a message header."""
    return re.fullmatch(_NAME, name) is not None


_FREE_CHANNELS = (THINKING, "commentary", "final")


# Either the reasoning is free and the final message has a given format, or all messages except
# calls are free. Markers are tokens, so free text cannot contain one.
class Channels:
    """Structural tags of constrained Harmony responses, for one model."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._sequence = Forms(tokens).sequence

    def final(self, form: Format) -> Format:
        """Return the format of a response with optional reasoning and a final message of `form`."""
        return self._sequence(self._thought(), CHANNEL, "final", MESSAGE, form)

    def calls(self, tools: Sequence[tuple[str, Mapping[str, Any]]], *, parallel: bool) -> Format:
        """Return the format of a response with optional reasoning and one or more calls.

        Args:
            tools: names, with the schemas of their arguments.
            parallel: False: nothing follows a call.
        """
        return self._sequence(self._thought(), self._calls(tools, parallel))

    def calls_or(
        self,
        form: Format,
        tools: Sequence[tuple[str, Mapping[str, Any]]],
        *,
        parallel: bool,
    ) -> Format:
        """Return the format of a response with optional reasoning, then calls or a final message.

        Args:
            form: format of the final message.
            tools, parallel: see `calls`. Tools whose name does not fit into a header are left out.
        """
        final = self._sequence(CHANNEL, "final", MESSAGE, form)
        callable_tools = [tool for tool in tools if can_call(tool[0])]
        calls = [self._calls(callable_tools, parallel)] if callable_tools else []
        return self._sequence(self._thought(), one_of(final, *calls))

    def free(self, tools: Sequence[tuple[str, Mapping[str, Any]]], *, parallel: bool) -> Format:
        """Return the format of a free response in which each call is complete.

        The response may begin within a message that the prompt has opened.

        Args:
            tools, parallel: see `calls`. Tools whose name does not fit into a header cannot be
                called.
        """
        calls = [self._call(*tool) for tool in tools if can_call(tool[0])]
        channels = one_of(*({"type": "const_string", "value": each} for each in _FREE_CHANNELS))
        said = self._sequence(CHANNEL, channels, MESSAGE, ANYTHING)
        if parallel or not calls:
            message = one_of(said, *calls)
            return self._sequence(one_of(ANYTHING, message), self._more(message))
        call = one_of(*calls)
        last = optional(self._next(call))
        return one_of(self._sequence(one_of(ANYTHING, said), self._more(said), last), call)

    def _more(self, message: Format) -> Format:
        """Return the format of any number of messages."""
        return star(self._next(message))

    def _calls(self, tools: Sequence[tuple[str, Mapping[str, Any]]], parallel: bool) -> Format:
        call = one_of(*(self._call(*tool) for tool in tools))
        return self._sequence(call, *([self._more(call)] if parallel else []))

    def _next(self, message: Format) -> Format:
        return self._sequence(END, START, "assistant", message)

    def _thought(self) -> Format:
        thought = self._sequence(CHANNEL, THINKING, MESSAGE, ANYTHING, END, START, "assistant")
        return optional(thought)

    def _call(self, name: str, schema: Mapping[str, Any]) -> Format:
        to = f" to=functions.{name}"
        header = one_of(
            self._sequence(CHANNEL, f"commentary{to} "), self._sequence(to, CHANNEL, "commentary ")
        )
        arguments = {"type": "json_schema", "json_schema": schema}
        return self._sequence(header, CONSTRAIN, "json", MESSAGE, arguments)
