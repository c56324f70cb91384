"""Harmony's answers as structural tags: what a model thinks first is free, and the message behind
has a form; or all messages are free but calls. Markers are tokens: no text that is free can be one,
and each stands where it must."""

from collections.abc import Mapping, Sequence
from typing import Any

from api.parsers.forms import ANYTHING, Format, Forms, one_of, optional, star
from api.parsers.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START, THINKING, can_call

_FREE_CHANNELS = (THINKING, "commentary", "final")


class Channels:
    """Of one model."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        """
        Args:
            tokens: that its markers are.
        """
        self._sequence = Forms(tokens).sequence

    def final(self, form: Format) -> Format:
        """Of an answer that is of a form, once it is thought over."""
        return self._sequence(self._thought(), CHANNEL, "final", MESSAGE, form)

    def calls(self, tools: Sequence[tuple[str, Mapping[str, Any]]], *, parallel: bool) -> Format:
        """Of an answer that is a call, once it is thought over, and perhaps more of them.

        Args:
            tools: by name, with the schema that arguments are held to.
            parallel: False: behind a call there is nothing more.
        """
        return self._sequence(self._thought(), self._calls(tools, parallel))

    def calls_or(
        self,
        form: Format,
        tools: Sequence[tuple[str, Mapping[str, Any]]],
        *,
        parallel: bool,
    ) -> Format:
        """Return the format of an answer that is either calls or of a form, once it is thought
        over.

        Args:
            form: of the message in the channel `final`.
            tools, parallel: as of `calls`; tools that no header has a place for are left out.
        """
        final = self._sequence(CHANNEL, "final", MESSAGE, form)
        callable_tools = [tool for tool in tools if can_call(tool[0])]
        calls = [self._calls(callable_tools, parallel)] if callable_tools else []
        return self._sequence(self._thought(), one_of(final, *calls))

    def free(self, tools: Sequence[tuple[str, Mapping[str, Any]]], *, parallel: bool) -> Format:
        """Of an answer that is whatever the model likes, but each call in it is whole. It may begin
        in the midst of a message, where the prompt does.

        Args:
            tools, parallel: as of `calls`; of those that no header has a place for there are none.
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
        """Any number of messages."""
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
