"""Text as it comes, for whoever reads it as if all of it were there.

A grammar is a generator over a Source: it takes what it needs with `yield from`, which waits where
the text does not say yet. So it is written straight down, and what it finds does not depend on how
the text was cut. Knows no format.

A marker that the model has a special token for is one only where that token stands: spelt with
others it is text like any other, which may be about markers.
"""

from collections.abc import Callable, Container, Generator, Sequence
from typing import TypeAlias, TypeVar

from router.parsers.said import Content, Said

T = TypeVar("T")

Steps: TypeAlias = Generator[None, None, T]
Tell: TypeAlias = Callable[[str], None]
# What a grammar looks for the end of: the number of characters that belong to it, None: all.
Scan: TypeAlias = Callable[[str], int | None]


class Source:
    """For one grammar. What it has found out is taken with `heard`."""

    def __init__(self, tokens: Container[str] = ()) -> None:
        """
        Args:
            tokens: markers that are special tokens.
        """
        self._tokens = tokens
        self._marks: set[int] = set()  # where those stand, in characters from the text's start
        self._text = ""  # not taken yet
        self._taken = 0  # characters before it
        self._ended = False
        self._said: list[Said] = []
        self._record: list[str] | None = None
        self.trimmed = ""  # white space that was left out before the last marker

    # What the text's owner calls ------------------------------------------------------------------

    def feed(self, text: str, marks: Sequence[int]) -> None:
        """
        Args:
            marks: as of Parser.push.
        """
        begun = self._taken + len(self._text)
        self._marks.update(begun + mark for mark in marks)
        self._text += text

    def end(self) -> None:
        self._ended = True

    def heard(self) -> Sequence[Said]:
        """What has been said since the last time."""
        said, self._said = self._said, []
        return said

    # What grammars call ---------------------------------------------------------------------------

    def say(self, said: Said) -> None:
        self._said.append(said)

    def content(self, text: str) -> None:
        if text:
            self.say(Content(text))

    def record(self) -> None:
        """Keeps what is taken from here on, should it not be what it seems."""
        self._record = []

    def recorded(self) -> str:
        """All of that, which is kept no longer."""
        kept, self._record = self._record or [], None
        return "".join(kept)

    def put_back(self, text: str) -> None:
        """What was taken last."""
        self._text = text + self._text
        self._taken -= len(text)

    def until(self, *markers: str, tell: Tell, trim: bool = False) -> Steps[str]:
        """Tells the text up to the first of `markers`, and takes it.

        Args:
            trim: leaves out white space before a marker, which is then `trimmed`.
        Returns:
            The marker, "" where the text has ended without one.
        """
        while not (found := self._first(markers)):
            if self._ended:
                tell(self._take(len(self._text)))
                return ""
            tell(self._take(self._decided(markers, trim)))
            yield
        index, marker = found
        text = self._take(index)
        told = text.rstrip() if trim else text
        self.trimmed = text[len(told) :]
        tell(told)
        self._take(len(marker))
        return marker

    def collected(self, *markers: str) -> Steps[tuple[str, str]]:
        """The text up to the first of `markers`, and the marker, as `until` gives it."""
        parts: list[str] = []
        marker = yield from self.until(*markers, tell=parts.append)
        return "".join(parts), marker

    def accept(self, *markers: str) -> Steps[str]:
        """Takes the marker that the text goes on with, and white space before it; "" and nothing
        taken where it goes on with none."""
        while True:
            spaces = len(self._text) - len(self._text.lstrip())
            text = self._text[spaces:]
            for marker in markers:
                if text.startswith(marker) and self._may_be(marker, spaces):
                    self._take(spaces + len(marker))
                    return marker
            begun = [marker for marker in markers if marker.startswith(text)]
            if self._ended or not any(not text or self._may_be(each, spaces) for each in begun):
                return ""
            yield

    def take(self, character: str) -> Steps[None]:
        """Takes that character if it is the next one."""
        if (yield from self.next_is(character)):
            self._take(1)

    def spaces(self) -> Steps[None]:
        """Takes white space."""
        yield from self.skip(str.isspace)

    def skip(self, belongs: Callable[[str], bool]) -> Steps[None]:
        """Takes all characters that belong, up to the first that does not."""
        while True:
            number = next((n for n, c in enumerate(self._text) if not belongs(c)), None)
            self._take(len(self._text) if number is None else number)
            if number is not None or self._ended:
                return
            yield

    def rest(self, tell: Tell) -> Steps[None]:
        """Tells all text from here on."""
        while not self._ended:
            tell(self._take(len(self._text)))
            yield
        tell(self._take(len(self._text)))

    def next_is(self, characters: str) -> Steps[bool]:
        """Whether the next character is one of these; takes none."""
        while not self._text and not self._ended:
            yield
        return bool(self._text) and self._text[0] in characters

    def through(self, scan: Scan, tell: Tell) -> Steps[bool]:
        """Tells the text to the end that `scan` finds, which is called with every character once;
        returns whether it has found one."""
        while (number := scan(self._text)) is None:
            tell(self._take(len(self._text)))
            if self._ended:
                return False
            yield
        tell(self._take(number))
        return True

    def _take(self, number: int) -> str:
        taken, self._text = self._text[:number], self._text[number:]
        self._taken += number
        if self._record is not None:
            self._record.append(taken)
        return taken

    def _decided(self, markers: Sequence[str], trim: bool) -> int:
        """Characters that are before any marker, whatever comes."""
        text = self._text
        longest = min(max(map(len, markers)) - 1, len(text))
        for number in range(longest, 0, -1):
            end, index = text[-number:], len(text) - number
            if any(each.startswith(end) and self._may_be(each, index) for each in markers):
                text = text[:-number]
                break
        return len(text.rstrip() if trim else text)

    def _first(self, markers: Sequence[str]) -> tuple[int, str] | None:
        """Where the first of them is; of two that begin there the longer."""
        found = [(index, -len(m), m) for m in markers if (index := self._find(m)) >= 0]
        if not found:
            return None
        index, _, marker = min(found)
        return index, marker

    def _find(self, marker: str) -> int:
        index = self._text.find(marker)
        while index >= 0 and not self._may_be(marker, index):
            index = self._text.find(marker, index + 1)
        return index

    def _may_be(self, marker: str, index: int) -> bool:
        """Whether what is spelt there as that marker is, is one."""
        return marker not in self._tokens or self._taken + index in self._marks


def nobody(text: str) -> None:
    """For text that nobody is told."""


class PlainParser:
    """A Parser of an answer that is content, all of it."""

    def push(self, text: str, marks: Sequence[int]) -> Sequence[Said]:
        return (Content(text),) if text else ()

    def finish(self) -> Sequence[Said]:
        return ()


class GrammarParser:
    """A Parser that runs a grammar."""

    def __init__(
        self, grammar: Callable[[Source], Steps[None]], tokens: Container[str] = ()
    ) -> None:
        """
        Args:
            tokens: as of Source.
        """
        self._source = Source(tokens)
        self._steps = grammar(self._source)

    def push(self, text: str, marks: Sequence[int]) -> Sequence[Said]:
        self._source.feed(text, marks)
        next(self._steps, None)
        return self._source.heard()

    def finish(self) -> Sequence[Said]:
        self._source.end()
        next(self._steps, None)
        return self._source.heard()
