"""Incremental text for grammars that read it as if it were complete.

A grammar is a generator over a ParserSource. It reads with `yield from`, which waits while the text
is undecided, so its result does not depend on how the text is split.

A ParserSource keeps no more unread text than may be the start of a marker. The cost of a character
depends neither on the amount of text before it nor on the size of the pieces.

If the model has a special token for a marker, only that token is the marker. The same text in other
tokens is plain text, for example in a text about markers.
"""

import random
import re
import string
from collections.abc import Callable, Container, Generator, Sequence
from functools import lru_cache
from typing import TypeAlias, TypeVar

import msgspec

T = TypeVar("T")

Steps: TypeAlias = Generator[None, None, T]
Emit: TypeAlias = Callable[[str], None]
# Returns the index at which a part of a text ends that begins or continues at an index. None: it
# ends later.
Scan: TypeAlias = Callable[[str, int], int | None]

_SPACES = re.compile(r"\s*")
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


class ParserSource:
    """The text for one grammar. `parsed` returns the parts that the grammar has reported."""

    def __init__(self, tokens: Container[str] = ()) -> None:
        self._tokens = tokens
        self._marks: set[int] = set()  # positions of marker tokens, in characters from the start
        self._text = ""
        self._at = 0  # index of the unread text
        self._taken = 0  # number of characters dropped before it
        self._ended = False
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, tuple[str, str, list[str]]] = {}  # id, name and arguments
        self.num_calls = 0
        self._record: list[str] | None = None
        self.trimmed = ""  # white space left out before the last marker

    def feed(self, text: str, marks: Sequence[int]) -> None:
        """Add text.

        Args:
            marks: indices in `text` at which a special token begins that is a marker.
        """
        begun = self._taken + len(self)
        self._marks.update(begun + mark for mark in marks)
        self._text = self._text[self._at :] + text
        self._at = 0

    def __len__(self) -> int:
        """Return the number of unread characters."""
        return len(self._text) - self._at

    def end(self) -> None:
        self._ended = True

    def parsed(self) -> ParsedText:
        """Return the parts reported since the last call."""
        content, self._content = "".join(self._content), []
        reasoning, self._reasoning = "".join(self._reasoning), []
        calls, self._calls = self._calls, {}
        parts = [
            CallPart(index, call_id, name, "".join(arguments))
            for index, (call_id, name, arguments) in calls.items()
        ]
        return ParsedText(content, reasoning, parts)

    def content(self, text: str) -> None:
        """Report a part of the text for the user."""
        self._content.append(text)

    def reasoning(self, text: str) -> None:
        """Report a part of the reasoning before the content."""
        self._reasoning.append(text)

    def call(self, name: str) -> None:
        """Report the beginning of a tool call."""
        self._calls[self.num_calls] = _new_id(), name, []
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Report a part of the last call's arguments. All parts together are JSON."""
        *_, arguments = self._calls.setdefault(self.num_calls - 1, ("", "", []))
        arguments.append(text)

    def record(self) -> None:
        """Start to record the text that is read, in case it turns out to be content."""
        self._record = []

    def recorded(self) -> str:
        """Return the recorded text and stop recording."""
        kept, self._record = self._record or [], None
        return "".join(kept)

    def put_back(self, marker: str) -> None:
        """Put back the marker that was read last."""
        if self._record:
            self._record.pop()
        self._restore(marker)

    def until(self, *markers: str, emit: Emit, trim: bool = False) -> Steps[str]:
        """Report the text up to the first of `markers`, and read the marker.

        Args:
            trim: leave out white space before a marker, and keep it in `trimmed`.

        Returns:
            The marker, or "" if the text has ended without one.
        """
        spaces: list[str] = []  # pending: it is left out if a marker follows
        while not (found := self._first(markers)):
            text = self._take(len(self) if self._ended else self._decided(markers))
            decided = text.rstrip() if trim and not self._ended else text
            if decided or self._ended:
                emit("".join(spaces) + decided)
                spaces.clear()
            spaces.append(text[len(decided) :])
            if self._ended:
                return ""
            yield
        index, marker = found
        text = self._take(index - self._at)
        decided = text.rstrip() if trim else text
        spaces.append(text)
        before = "".join(spaces)
        self.trimmed = before[len(before.rstrip()) :] if trim else ""
        emit(before[: len(before) - len(self.trimmed)])
        self._take(len(marker))
        return marker

    def collected(self, *markers: str) -> Steps[tuple[str, str]]:
        """Return the text up to the first of `markers`, and the marker as `until` returns it."""
        parts: list[str] = []
        marker = yield from self.until(*markers, emit=parts.append)
        return "".join(parts), marker

    def accept(self, *markers: str) -> Steps[str]:
        """Skip white space and read the marker that is next. Read nothing if none is next."""
        spaces: list[str] = []
        longest = max(map(len, markers))
        while True:
            spaces.append(self._passed(self._num_spaces()))
            text = self._text[self._at : self._at + longest]
            for marker in markers:
                if text.startswith(marker) and self._may_be(marker, self._at):
                    self._keep("".join(spaces) + self._passed(len(marker)))
                    return marker
            begun = [marker for marker in markers if marker.startswith(text)]
            if self._ended or not any(not text or self._may_be(each, self._at) for each in begun):
                self._restore("".join(spaces))
                return ""
            yield

    def take(self, character: str) -> Steps[None]:
        """Read this character if it is next."""
        if (yield from self.next_is(character)):
            self._take(1)

    def spaces(self) -> Steps[None]:
        while True:
            self._take(self._num_spaces())
            if len(self) or self._ended:
                return
            yield

    def rest(self, emit: Emit) -> Steps[None]:
        """Report all remaining text."""
        while not self._ended:
            emit(self._take(len(self)))
            yield
        emit(self._take(len(self)))

    def next_is(self, characters: str) -> Steps[bool]:
        """Return whether the next character is one of these, without reading it."""
        while not len(self) and not self._ended:
            yield
        return len(self) > 0 and self._text[self._at] in characters

    def through(self, scan: Scan, emit: Emit) -> Steps[bool]:
        """Report the text up to the end that `scan` finds. Return whether it has found one.

        `scan` sees every character once.
        """
        while (end := scan(self._text, self._at)) is None:
            emit(self._take(len(self)))
            if self._ended:
                return False
            yield
        emit(self._take(end - self._at))
        return True

    def _take(self, number: int) -> str:
        taken = self._passed(number)
        self._keep(taken)
        return taken

    def _passed(self, number: int) -> str:
        """Read that many characters without recording them."""
        taken = self._text[self._at : self._at + number]
        self._at += number
        self._taken += number
        return taken

    def _keep(self, taken: str) -> None:
        if self._record is not None:
            self._record.append(taken)

    def _restore(self, text: str) -> None:
        """Put back text that was read last."""
        self._taken -= len(text)
        self._at -= len(text)
        if self._at < 0:  # more text has arrived since
            self._text = text + self._text[self._at + len(text) :]
            self._at = 0

    def _num_spaces(self) -> int:
        """Return the amount of white space that is next."""
        spaces = _SPACES.match(self._text, self._at)
        return 0 if spaces is None else spaces.end() - self._at

    def _decided(self, markers: Sequence[str]) -> int:
        """Return the number of unread characters that precede any marker, whatever text follows."""
        end = len(self._text)
        for index in range(max(self._at, end - max(map(len, markers)) + 1), end):
            last = self._text[index:]
            if any(each.startswith(last) and self._may_be(each, index) for each in markers):
                return index - self._at
        return len(self)

    def _first(self, markers: Sequence[str]) -> tuple[int, str] | None:
        """Return the position of the first marker. If two begin there, the longer one wins."""
        pattern, longest_first = _searched(markers)
        begin = self._at
        while (found := pattern.search(self._text, begin)) is not None:
            begin = found.start()
            for marker in longest_first:
                if self._text.startswith(marker, begin) and self._may_be(marker, begin):
                    return begin, marker
            begin += 1
        return None

    def _may_be(self, marker: str, index: int) -> bool:
        """Return whether the text of a marker at this position is the marker, not other tokens."""
        return marker not in self._tokens or self._taken + index - self._at in self._marks


@lru_cache(maxsize=64)
def _searched(markers: Sequence[str]) -> tuple[re.Pattern[str], Sequence[str]]:
    """Return a pattern that finds any of the markers in one pass."""
    longest_first = sorted(markers, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))), longest_first


def discard(text: str) -> None: ...


def _new_id() -> str:
    return "".join(random.choices(_CHARACTERS, k=_ID_CHARACTERS))


class GrammarParser:
    """Parses one response with a grammar. The result does not depend on how the text is split."""

    def __init__(
        self, grammar: Callable[[ParserSource], Steps[None]], tokens: Container[str] = ()
    ) -> None:
        self._source = ParserSource(tokens)
        self._steps = grammar(self._source)
        self._reads = True  # False once the grammar has ended: later text is discarded

    @property
    def num_calls(self) -> int:
        return self._source.num_calls

    def parse(self, text: str, marks: Sequence[int] = (), *, last: bool) -> ParsedText:
        """Parse more text and return the parts that no later text can change.

        Args:
            marks: see ParserSource.feed.
            last: the text is complete.
        """
        if self._reads:
            self._source.feed(text, marks)
            if last:
                self._source.end()
            self._reads = next(self._steps, self) is not self
        return self._source.parsed()


class StreamParser:
    """Parses one response as it arrives, into content, reasoning and tool calls.

    Args:
        make: makes the parser. Called with the first text, after the prompt is rendered.
        parallel: False: only the first call is returned.
    """

    def __init__(self, make: Callable[[], GrammarParser], *, parallel: bool = True) -> None:
        self._make = make
        self._parser: GrammarParser | None = None
        self._parallel = parallel

    @property
    def begun(self) -> bool:
        """Return whether there has been any text."""
        return self._parser is not None

    @property
    def has_called(self) -> bool:
        return self._parser is not None and self._parser.num_calls > 0

    def parse(self, text: str, marks: Sequence[int] = (), *, last: bool) -> ParsedText:
        """Return what more text adds to the response. For the arguments see GrammarParser."""
        if self._parser is None:
            self._parser = self._make()
        parsed = self._parser.parse(text, marks, last=last)
        if self._parallel:
            return parsed
        first = [part for part in parsed.calls if part.index == 0]
        return ParsedText(parsed.content, parsed.reasoning, first)
