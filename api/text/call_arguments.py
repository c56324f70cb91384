"""Arguments of an earlier call, as a chat template gets them: an object that is also the text that
its client sent. Any text is accepted: models write broken calls, and clients send them back."""

from collections.abc import Mapping
from typing import Any

import msgspec

from api.text.limits import MAX_VALUES


class CallArguments(dict[str, Any]):
    """Some templates print these as any object, others join them to text.

    Attributes:
        verbatim: the text, where it is no JSON object. Templates that want an object print this
            text then. Those that print each argument see it as an argument called "arguments".
    """

    def __init__(self, text: str, values: Mapping[str, Any] | None) -> None:
        """
        Args:
            text: what the client sent.
            values: the object that it is, if it is one.
        """
        super().__init__({"arguments": text} if values is None else values)
        self._text = text
        self.verbatim = text if values is None else None

    def __str__(self) -> str:
        return self._text

    def __add__(self, text: str) -> str:
        return self._text + text

    def __radd__(self, text: str) -> str:
        return text + self._text


def call_arguments(text: str) -> CallArguments:
    """
    Args:
        text: any text; "" is an empty object.
    """
    text = text or "{}"
    # A value costs more than its bytes, and the values in a text were not counted with the body's.
    if sum(map(text.count, "[{,")) > MAX_VALUES:
        return CallArguments(text, None)
    try:
        values = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return CallArguments(text, None)
    return CallArguments(text, values if isinstance(values, dict) else None)
