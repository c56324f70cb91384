"""Events that parsers of a response's text yield, and StreamParser, which collects them."""

import random
import string
from collections.abc import Callable, Sequence
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
    """Parses one response. The result does not depend on how the text is split."""

    def push(self, text: str, marks: Sequence[int]) -> Sequence[Said]:
        """Parse more text and return the parts that no later text can change.

        Args:
            marks: indices in `text` at which a special token begins that is a marker.
        """
        ...

    def finish(self) -> Sequence[Said]:
        """Return the remaining parts after the end of the text."""
        ...


_CHARACTERS = string.ascii_letters + string.digits
_ID_CHARACTERS = 9  # Mistral's templates accept only this many letters and digits


class CallPart(msgspec.Struct, frozen=True):
    """An addition to one tool call. The first addition has its id and name."""

    index: int
    id: str
    name: str
    arguments: str


class ParsedText(msgspec.Struct, frozen=True):
    content: str
    reasoning: str
    calls: Sequence[CallPart]  # at most one part for each call, in order

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class StreamParser:
    """Parses one response as it arrives, into content, reasoning and tool calls.

    Args:
        make: makes the parser. Called with the first text, after the prompt is rendered.
        parallel: False: only the first call is returned.
    """

    def __init__(self, make: Callable[[], OutputParser], *, parallel: bool = True) -> None:
        self._make = make
        self._parser: OutputParser | None = None
        self._parallel = parallel
        self._num_calls = 0

    @property
    def begun(self) -> bool:
        """Return whether there has been any text."""
        return self._parser is not None

    @property
    def has_called(self) -> bool:
        return self._num_calls > 0

    def parse(self, text: str, marks: Sequence[int] = (), *, last: bool) -> ParsedText:
        """Return what more text adds to the response.

        Args:
            marks: see OutputParser.push.
            last: the text is complete.
        """
        if self._parser is None:
            self._parser = self._make()
        said = [*self._parser.push(text, marks)]
        if last:
            said += self._parser.finish()
        return self._together(said)

    def _together(self, said: Sequence[Said]) -> ParsedText:
        content: list[str] = []
        reasoning: list[str] = []
        begun: dict[int, CallPart] = {}
        arguments: dict[int, list[str]] = {}
        for each in said:
            match each:
                case ContentEvent(text):
                    content.append(text)
                case ReasoningEvent(text):
                    reasoning.append(text)
                case ToolCallEvent(name):
                    begun[self._num_calls] = CallPart(self._num_calls, _new_id(), name, "")
                    arguments[self._num_calls] = []
                    self._num_calls += 1
                case ArgumentsEvent(text):
                    arguments.setdefault(self._num_calls - 1, []).append(text)
        calls = [
            CallPart(index, begun[index].id, begun[index].name, "".join(parts))
            if index in begun
            else CallPart(index, "", "", "".join(parts))
            for index, parts in arguments.items()
            if self._parallel or index == 0
        ]
        return ParsedText("".join(content), "".join(reasoning), calls)


def _new_id() -> str:
    return "".join(random.choices(_CHARACTERS, k=_ID_CHARACTERS))


class PlainParser:
    """An OutputParser for responses that are content only."""

    def push(self, text: str, marks: Sequence[int]) -> Sequence[Said]:
        return (ContentEvent(text),) if text else ()

    def finish(self) -> Sequence[Said]:
        return ()
