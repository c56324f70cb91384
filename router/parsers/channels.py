"""Harmony's answers as structural tags: what a model thinks first is free, and the message behind
has a form. Markers are tokens: no text that is free can be one, and each stands where it must."""

from collections.abc import Mapping, Sequence
from typing import Any

from router.parsers.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START, THINKING

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
        call = {"type": "or", "elements": [self._call(*tool) for tool in tools]}
        more = {"type": "star", "content": self._sequence(END, START, "assistant", call)}
        return self._sequence(self._thought(), call, *([more] if parallel else []))

    def _thought(self) -> Format:
        thought = self._sequence(CHANNEL, THINKING, MESSAGE, _ANYTHING, END, START, "assistant")
        return {"type": "optional", "content": thought}

    def _call(self, name: str, schema: Mapping[str, Any]) -> Format:
        recipient = f"commentary to=functions.{name} "
        arguments = {"type": "json_schema", "json_schema": schema}
        return self._sequence(CHANNEL, recipient, CONSTRAIN, "json", MESSAGE, arguments)

    def _sequence(self, *elements: str | Mapping[str, Any]) -> Format:
        """Of markers, other texts and formats."""
        return {"type": "sequence", "elements": [self._element(each) for each in elements]}

    def _element(self, element: str | Mapping[str, Any]) -> Mapping[str, Any]:
        if not isinstance(element, str):
            return element
        if element in self._tokens:
            return {"type": "token", "token": self._tokens[element]}
        return {"type": "const_string", "value": element}
