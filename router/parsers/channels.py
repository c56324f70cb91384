"""Harmony's answers as structural tags: what a model thinks first is free, and the message behind
has a form; or all messages are free but calls. Markers are tokens: no text that is free can be one,
and each stands where it must."""

from collections.abc import Mapping, Sequence
from typing import Any

from router.parsers.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START, THINKING, can_call

_FREE_CHANNELS = (THINKING, "commentary", "final")
_ANYTHING = {"type": "regex", "pattern": r"[\s\S]*"}

Format = dict[str, Any]


class Channels:
    """Of one model."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        """
        Args:
            tokens: that its markers are.
        """
        self._tokens = tokens

    def final(self, form: Mapping[str, Any]) -> Format:
        """Of an answer that is of a form, once it is thought over."""
        return self._sequence(self._thought(), CHANNEL, "final", MESSAGE, form)

    def calls(self, tools: Sequence[tuple[str, Mapping[str, Any]]], *, parallel: bool) -> Format:
        """Of an answer that is a call, once it is thought over, and perhaps more of them.

        Args:
            tools: by name, with the schema that arguments are held to.
            parallel: False: behind a call there is nothing more.
        """
        call = _one_of(*(self._call(*tool) for tool in tools))
        return self._sequence(self._thought(), call, *([self._more(call)] if parallel else []))

    def free(self, tools: Sequence[tuple[str, Mapping[str, Any]]], *, parallel: bool) -> Format:
        """Of an answer that is whatever the model likes, but each call in it is whole. It may begin
        in the midst of a message, where the prompt does.

        Args:
            tools, parallel: as of `calls`; of those that no header has a place for there are none.
        """
        calls = [self._call(*tool) for tool in tools if can_call(tool[0])]
        channels = _one_of(*({"type": "const_string", "value": each} for each in _FREE_CHANNELS))
        said = self._sequence(CHANNEL, channels, MESSAGE, _ANYTHING)
        if parallel or not calls:
            message = _one_of(said, *calls)
            return self._sequence(_one_of(_ANYTHING, message), self._more(message))
        call = _one_of(*calls)
        last = {"type": "optional", "content": self._next(call)}
        return _one_of(self._sequence(_one_of(_ANYTHING, said), self._more(said), last), call)

    def _more(self, message: Format) -> Format:
        """Any number of messages."""
        return {"type": "star", "content": self._next(message)}

    def _next(self, message: Format) -> Format:
        return self._sequence(END, START, "assistant", message)

    def _thought(self) -> Format:
        thought = self._sequence(CHANNEL, THINKING, MESSAGE, _ANYTHING, END, START, "assistant")
        return {"type": "optional", "content": thought}

    def _call(self, name: str, schema: Mapping[str, Any]) -> Format:
        to = f" to=functions.{name}"
        header = _one_of(
            self._sequence(CHANNEL, f"commentary{to} "), self._sequence(to, CHANNEL, "commentary ")
        )
        arguments = {"type": "json_schema", "json_schema": schema}
        return self._sequence(header, CONSTRAIN, "json", MESSAGE, arguments)

    def _sequence(self, *elements: str | Mapping[str, Any]) -> Format:
        """Of markers, other texts and formats."""
        return {"type": "sequence", "elements": [self._element(each) for each in elements]}

    def _element(self, element: str | Mapping[str, Any]) -> Mapping[str, Any]:
        if not isinstance(element, str):
            return element
        if element in self._tokens:
            return {"type": "token", "token": self._tokens[element]}
        return {"type": "const_string", "value": element}


def _one_of(*elements: Mapping[str, Any]) -> Format:
    return {"type": "or", "elements": elements}
