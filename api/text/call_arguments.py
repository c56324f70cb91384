"""Arguments of an earlier call for chat templates: an object that is also the client's text.

Any text is accepted, because models write broken calls and clients send them back.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from api.text.limits import MAX_VALUES


class CallArguments(dict[str, Any]):
    """Arguments of a call. Some templates print them as an object, others join them to text.

    Attributes:
        verbatim: the text if it is not a JSON object. Templates that print an object then print
            this text. Templates that print each argument see it as an argument called "arguments".
    """

    def __init__(self, text: str, values: Mapping[str, Any] | None) -> None:
        """
        Args:
            text: the client's text.
            values: the decoded object, if the text is one.
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
    """Return the arguments of a call.

    Args:
        text: any text. "" is an empty object.
    """
    text = text or "{}"
    # A value costs more than its bytes, and the body's count does not include values within a text.
    if sum(map(text.count, "[{,")) > MAX_VALUES:
        return CallArguments(text, None)
    try:
        values = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return CallArguments(text, None)
    return CallArguments(text, values if isinstance(values, dict) else None)
