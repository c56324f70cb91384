"""The parts that an answer's text turns out to have, and who finds them."""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import msgspec


class Content(msgspec.Struct, frozen=True):
    """What is said to the user."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """What is thought before."""

    text: str


class Call(msgspec.Struct, frozen=True):
    """A call of a tool begins."""

    name: str


class Arguments(msgspec.Struct, frozen=True):
    """More of the last call's arguments, which together are JSON."""

    text: str


Said: TypeAlias = Content | Reasoning | Call | Arguments


class Parser(Protocol):
    """Of one answer. However its text is cut into pieces, what is found is the same."""

    def push(self, text: str, marks: Sequence[int]) -> Sequence[Said]:
        """What the text so far adds that no later text can change.

        Args:
            marks: characters of `text` at which a marker begins that is a special token.
        """
        ...

    def finish(self) -> Sequence[Said]:
        """The rest, once no more text can come."""
        ...
