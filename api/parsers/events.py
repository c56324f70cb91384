"""The parts of a response's text, and the protocol of the parsers that find them."""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import msgspec


class ContentEvent(msgspec.Struct, frozen=True):
    """Part of the text for the user."""

    text: str


class ReasoningEvent(msgspec.Struct, frozen=True):
    """Part of the reasoning before the content."""

    text: str


class ToolCallEvent(msgspec.Struct, frozen=True):
    """The beginning of a tool call."""

    name: str


class ArgumentsEvent(msgspec.Struct, frozen=True):
    """Part of the last call's arguments. All parts together are JSON."""

    text: str


Said: TypeAlias = ContentEvent | ReasoningEvent | ToolCallEvent | ArgumentsEvent


class OutputParser(Protocol):
    """Parser of one response. The result does not depend on how the text is split."""

    def push(self, text: str, marks: Sequence[int]) -> Sequence[Said]:
        """Parse more text and return the parts that no later text can change.

        Args:
            marks: indices in `text` at which a marker begins that is a special token.
        """
        ...

    def finish(self) -> Sequence[Said]:
        """Return the remaining parts after the end of the text."""
        ...
