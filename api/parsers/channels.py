"""Constrained Harmony responses as structural tags.

Either the reasoning is free and the final message has a given format, or all messages except calls
are free. Markers are tokens, so free text cannot contain one, and each stands where it must.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from api.parsers.forms import ANYTHING, Format, Forms, one_of, optional, star
from api.parsers.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START, THINKING, can_call

_FREE_CHANNELS = (THINKING, "commentary", "final")


class Channels:
    """Structural tags for one model."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        """
        Args:
            tokens: the token ids of the markers.
        """
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
            form: format of the message in the channel `final`.
            tools, parallel: see `calls`. Tools whose name does not fit into a header are left out.
        """
        final = self._sequence(CHANNEL, "final", MESSAGE, form)
        callable_tools = [tool for tool in tools if can_call(tool[0])]
        calls = [self._calls(callable_tools, parallel)] if callable_tools else []
        return self._sequence(self._thought(), one_of(final, *calls))

    def free(self, tools: Sequence[tuple[str, Mapping[str, Any]]], *, parallel: bool) -> Format:
        """Return the format of a free response in which each call is complete.

        The response may begin within a message, where the prompt ends.

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
