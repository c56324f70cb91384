"""Finds what ends an answer in its text as it comes, holding back what may be the start of it."""

from collections.abc import Sequence
from typing import Protocol

from router.text.expressions import Expression, reached

MAX_MATCH_CHARACTERS = 1024  # of what an expression finds: so much text can be held back


class Watcher(Protocol):
    """Is told every character of a text."""

    def advance(self, character: str) -> int:
        """Length of the longest match that ends with it; 0: there is none."""
        ...

    @property
    def undecided(self) -> int:
        """Characters at the end of the text that may be the start of a match."""
        ...


class Stops:
    """Cuts one request's text at the match that is complete first; of two that end at the same
    character, at the longer. The result does not depend on how the text is split.

    Attributes:
        found: the text that it was cut at, if it was.
    """

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = watchers
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """Returns the text that is decided now, and whether a match is complete.

        Nothing may be pushed after that.
        """
        self._held += text
        start = len(self._held) - len(text)
        for index, character in enumerate(text, start=start + 1):
            found = max(watcher.advance(character) for watcher in self._watchers)
            if found:
                self.found = self._held[index - found : index]
                return self._held[: index - found], True
        undecided = max(watcher.undecided for watcher in self._watchers)
        decided = len(self._held) - undecided
        out, self._held = self._held[:decided], self._held[decided:]
        return out, False

    def flush(self) -> str:
        """What was held back, once no more text can come."""
        out, self._held = self._held, ""
        return out


def stops_of(strings: Sequence[str], expressions: Sequence[Expression]) -> Stops | None:
    """None: there is nothing to look for."""
    watchers: list[Watcher] = [StopStrings(strings)] if strings else []
    watchers += map(StopExpression, expressions)
    return Stops(watchers) if watchers else None


class StopStrings:
    """A Watcher for any of some strings."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._matched = [0] * len(stops)  # characters of each stop that the text now ends with

    @property
    def undecided(self) -> int:
        return max(self._matched, default=0)

    def advance(self, character: str) -> int:
        """One step of Knuth-Morris-Pratt in every stop."""
        found = 0
        for number, (stop, borders) in enumerate(self._stops):
            matched = self._matched[number]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            if stop[matched] == character:
                matched += 1
            if matched == len(stop):
                found = max(found, matched)
                matched = 0
            self._matched[number] = matched
        return found


class StopExpression:
    """A Watcher for an expression.

    Of all ways that lead to one of its nodes only the earliest and the latest start are known.
    Where the earliest would make a match longer than it may be, the latest takes its place: so a
    match that is no longer is never missed.
    """

    def __init__(self, wanted: Expression) -> None:
        self._wanted = wanted
        self._length = 0  # of the text so far
        self._before = ""  # its last character
        # By node that takes the next character: where the ways to it started.
        self._ways: dict[int, tuple[int, int]] = {}
        # What a node leads to, behind a line's end and behind another character.
        self._leads: dict[tuple[int, bool], frozenset[int]] = {}

    @property
    def undecided(self) -> int:
        starts = (earliest for earliest, _ in self._ways.values())
        return self._length - min(starts, default=self._length)

    def advance(self, character: str) -> int:
        wanted, ways = self._wanted, self._ways
        begun = reached(wanted, wanted.first, after=self._before, at_text_start=not self._length)
        for node in begun:
            ways[node] = ways.get(node, (self._length,))[0], self._length
        self._length += 1
        self._before = character
        oldest = self._length - MAX_MATCH_CHARACTERS
        found = self._length
        self._ways = {}
        for node, (earliest, latest) in ways.items():
            matches = wanted.nodes[node].matches
            if latest < oldest or matches is None or not matches(character):
                continue
            if earliest < oldest:
                earliest = latest
            for after in self._led(node, character == "\n"):
                if after == wanted.end:
                    found = min(found, earliest)
                else:
                    others = self._ways.get(after, (earliest, latest))
                    self._ways[after] = min(earliest, others[0]), max(latest, others[1])
        return self._length - found

    def _led(self, node: int, at_line_start: bool) -> frozenset[int]:
        """Where the next character is taken, behind one that `node` has taken."""
        key = node, at_line_start
        if key not in self._leads:
            (then,) = self._wanted.nodes[node].to
            after = "\n" if at_line_start else ""
            self._leads[key] = reached(self._wanted, then, after=after)
        return self._leads[key]


def _borders(stop: str) -> list[int]:
    """For each prefix of `stop`: how long is its longest proper prefix that is its suffix too."""
    borders = [0] * len(stop)
    for index in range(1, len(stop)):
        length = borders[index - 1]
        while length and stop[length] != stop[index]:
            length = borders[length - 1]
        borders[index] = length + (stop[length] == stop[index])
    return borders
