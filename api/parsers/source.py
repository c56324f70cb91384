"""Text as it comes, for whoever reads it as if all of it were there.

A grammar is a generator over a Source: it takes what it needs with `yield from`, which waits where
the text does not say yet. So it is written straight down, and what it finds does not depend on how
the text was cut. Knows no format.

Text that a grammar waits with is taken out of the way: no more is left than may be the start of a
marker. A character costs the same however many came before it, one by one or at once.

A marker that the model has a special token for is one only where that token stands: spelt with
others it is text like any other, which may be about markers.
"""

import re
from collections.abc import Callable, Container, Generator, Sequence
from functools import lru_cache
from typing import TypeAlias, TypeVar

from api.parsers.events import Content, Said

T = TypeVar("T")

Steps: TypeAlias = Generator[None, None, T]
Tell: TypeAlias = Callable[[str], None]
# Finds where a part of a text ends that begins, or continues, at an index. None: behind the text.
Scan: TypeAlias = Callable[[str, int], int | None]

_SPACES = re.compile(r"\s*")


class Source:
    """For one grammar. What it has found out is taken with `heard`."""

    def __init__(self, tokens: Container[str] = ()) -> None:
        """
        Args:
            tokens: markers that are special tokens.
        """
        self._tokens = tokens
        self._marks: set[int] = set()  # where those stand, in characters from the text's start
        self._text = ""
        self._at = 0  # where that begins which is not taken yet
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
        begun = self._taken + len(self)
        self._marks.update(begun + mark for mark in marks)
        self._text = self._text[self._at :] + text
        self._at = 0

    def __len__(self) -> int:
        """Return how many characters are not taken yet."""
        return len(self._text) - self._at

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

    def put_back(self, marker: str) -> None:
        """Put back the marker that was taken last."""
        if self._record:
            self._record.pop()
        self._restore(marker)

    def until(self, *markers: str, tell: Tell, trim: bool = False) -> Steps[str]:
        """Tells the text up to the first of `markers`, and takes it.

        Args:
            trim: leaves out white space before a marker, which is then `trimmed`.
        Returns:
            The marker, "" where the text has ended without one.
        """
        spaces: list[str] = []  # which stand before the marker, if one is next
        while not (found := self._first(markers)):
            text = self._take(len(self) if self._ended else self._decided(markers))
            told = text.rstrip() if trim and not self._ended else text
            if told or self._ended:
                tell("".join(spaces) + told)
                spaces.clear()
            spaces.append(text[len(told) :])
            if self._ended:
                return ""
            yield
        index, marker = found
        text = self._take(index - self._at)
        told = text.rstrip() if trim else text
        spaces.append(text)
        before = "".join(spaces)
        self.trimmed = before[len(before.rstrip()) :] if trim else ""
        tell(before[: len(before) - len(self.trimmed)])
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
        """Takes that character if it is the next one."""
        if (yield from self.next_is(character)):
            self._take(1)

    def spaces(self) -> Steps[None]:
        """Takes white space."""
        while True:
            self._take(self._num_spaces())
            if len(self) or self._ended:
                return
            yield

    def rest(self, tell: Tell) -> Steps[None]:
        """Tells all text from here on."""
        while not self._ended:
            tell(self._take(len(self)))
            yield
        tell(self._take(len(self)))

    def next_is(self, characters: str) -> Steps[bool]:
        """Whether the next character is one of these; takes none."""
        while not len(self) and not self._ended:
            yield
        return len(self) > 0 and self._text[self._at] in characters

    def through(self, scan: Scan, tell: Tell) -> Steps[bool]:
        """Tells the text to the end that `scan` finds, which is called with every character once;
        returns whether it has found one."""
        while (end := scan(self._text, self._at)) is None:
            tell(self._take(len(self)))
            if self._ended:
                return False
            yield
        tell(self._take(end - self._at))
        return True

    def _take(self, number: int) -> str:
        taken = self._passed(number)
        self._keep(taken)
        return taken

    def _passed(self, number: int) -> str:
        """Take so many characters that are not recorded, or not yet."""
        taken = self._text[self._at : self._at + number]
        self._at += number
        self._taken += number
        return taken

    def _keep(self, taken: str) -> None:
        if self._record is not None:
            self._record.append(taken)

    def _restore(self, text: str) -> None:
        """Put back what was taken last."""
        self._taken -= len(text)
        self._at -= len(text)
        if self._at < 0:  # more text has arrived since
            self._text = text + self._text[self._at + len(text) :]
            self._at = 0

    def _num_spaces(self) -> int:
        """Count white space that is next."""
        spaces = _SPACES.match(self._text, self._at)
        return 0 if spaces is None else spaces.end() - self._at

    def _decided(self, markers: Sequence[str]) -> int:
        """Characters that are before any marker, whatever comes."""
        end = len(self._text)
        for index in range(max(self._at, end - max(map(len, markers)) + 1), end):
            last = self._text[index:]
            if any(each.startswith(last) and self._may_be(each, index) for each in markers):
                return index - self._at
        return len(self)

    def _first(self, markers: Sequence[str]) -> tuple[int, str] | None:
        """Where the first of them is; of two that begin there the longer."""
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
        """Whether what is spelt there as that marker is, is one."""
        return marker not in self._tokens or self._taken + index - self._at in self._marks


@lru_cache(maxsize=64)
def _searched(markers: Sequence[str]) -> tuple[re.Pattern[str], Sequence[str]]:
    """Any of them, to be found in one pass."""
    longest_first = sorted(markers, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))), longest_first


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
        self._reads = True  # until the grammar has ended, which leaves all other text out

    def push(self, text: str, marks: Sequence[int]) -> Sequence[Said]:
        if not self._reads:
            return ()
        self._source.feed(text, marks)
        return self._heard()

    def finish(self) -> Sequence[Said]:
        self._source.end()
        return self._heard()

    def _heard(self) -> Sequence[Said]:
        self._reads = next(self._steps, self) is not self
        return self._source.heard()
