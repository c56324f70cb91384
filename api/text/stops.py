"""Detection of stop strings and stop expressions in a response's text as it arrives.

Text that may be the start of a match is held back. Stops are compiled once per request, into
`StopRules`. Each response has its own `StopConditions`, which hold its state.
"""

from collections.abc import Sequence

from api.text.positions import LINE_START, MIDDLE, TEXT_START, Alphabet, Positions
from common.errors import InvalidRequest, check_at_most

MAX_EXPRESSION_CHARACTERS = 1024
MAX_ALL_CHARACTERS = 4096  # characters of all expressions of a request
_MAX_KNOWN = 4096  # characters whose accepting positions are cached


# All expressions of a request become one automaton. Each character or character set in them is a
# position, and each position has the positions that may follow it. A set of positions is one
# integer, and the successors of eight positions are looked up at once (Navarro and Raffinot 2001).
# A character costs at most one lookup for each eight positions, whatever the expression and text,
# and an automaton never grows beyond its tables.
#
# Expressions have Python's syntax. Lookaround and backreferences are rejected.
class Automaton:
    """All expressions of one request. Shared by its responses, and constant except for caches.

    Attributes:
        first: positions that a match may read first, by the context where it begins.
        end: position that marks a complete match.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        """Compile expressions.

        Raises:
            InvalidRequest: an expression is invalid or matches an empty text, or all of them are
                too long. The message begins with its index.
        """
        for number, text in enumerate(texts):
            check_at_most(f"[{number}]", len(text), "characters", MAX_EXPRESSION_CHARACTERS)
        check_at_most("", sum(map(len, texts)), "characters", MAX_ALL_CHARACTERS)
        graph = Positions()
        for number, text in enumerate(texts):
            try:
                graph.add(text)
            except InvalidRequest as wrong:
                raise InvalidRequest(f"[{number}]: {wrong}") from None
        self.first = graph.first
        self.end = graph.end
        self._alphabet = Alphabet(graph.characters)
        self._accepting: dict[str, int] = {}
        self._after = _by_place(graph.after, 1)
        self._before = _by_place(graph.before, -1)

    def accepting(self, character: str) -> int:
        positions = self._accepting.get(character)
        if positions is None:
            if len(self._accepting) == _MAX_KNOWN:
                self._accepting.clear()
            positions = self._accepting[character] = self._alphabet.accepting(character)
        return positions

    def after(self, positions: int, character: str) -> int:
        """Return the positions that may follow positions that have read the character."""
        return self._after[character == "\n"](positions)

    def before(self, positions: int, character: str) -> int:
        """Return the positions that may have read the character before these."""
        return self._before[character == "\n"](positions)


class _Steps:
    """The union of the successors of positions.

    Most positions of a long expression lead to their neighbour. One shift computes all of these.

    Args:
        neighbour: 1: the next position. -1: the previous one.
    """

    def __init__(self, to: Sequence[int], neighbour: int) -> None:
        self._forward = neighbour > 0
        self._to_neighbour = self._elsewhere = 0
        others: list[int] = []
        for number, positions in enumerate(to):
            next_one = 1 << number + neighbour if number + neighbour >= 0 else 0
            if positions & next_one:
                self._to_neighbour |= 1 << number
            others.append(positions & ~next_one)
            if others[-1]:
                self._elsewhere |= 1 << number
        self._tables = [_Table(others[start : start + 8]) for start in range(0, len(others), 8)]

    def __call__(self, positions: int) -> int:
        near = positions & self._to_neighbour
        found = near << 1 if self._forward else near >> 1
        positions &= self._elsewhere
        if positions:
            tables = self._tables
            for table, byte in zip(tables, positions.to_bytes(len(tables), "little"), strict=True):
                if byte:
                    found |= table[byte]
        return found


def _by_place(lists: tuple[list[int], ...], neighbour: int) -> tuple[_Steps, ...]:
    middle, line_start = lists
    steps = _Steps(middle, neighbour)
    return steps, steps if middle == line_start else _Steps(line_start, neighbour)


class _Table(dict[int, int]):
    """The union of the successors of eight positions, for each set of them. Filled on use."""

    def __init__(self, to: Sequence[int]) -> None:
        self._to = to

    def __missing__(self, byte: int) -> int:
        others = byte & (byte - 1)
        found = self._to[(byte ^ others).bit_length() - 1] | (self[others] if others else 0)
        self[byte] = found
        return found


MAX_MATCH_CHARACTERS = 1024  # longest match of an expression that is found
# Matches that began too long ago are dropped whenever the text has a multiple of this many
# characters.
_FORGETS_EVERY = 512
MAX_HELD_CHARACTERS = MAX_MATCH_CHARACTERS + _FORGETS_EVERY


class StopConditions:
    """Cuts one response's text at the first complete match.

    If two matches end at the same character, the longer one counts. The result does not depend on
    how the text is split.

    Attributes:
        found: text of the match, if there was one.
    """

    def __init__(self, watchers: "Sequence[StopStrings | StopExpressions]") -> None:
        self._watchers = watchers
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that is decided now, and whether a match is complete.

        Do not call this after a complete match.
        """
        self._held += text
        start = len(self._held) - len(text)
        for index, character in enumerate(text, start=start + 1):
            found = 0
            for watcher in self._watchers:
                found = max(found, watcher.advance(character))
            if found:
                self.found = self._held[index - found : index]
                return self._held[: index - found], True
        undecided = max(watcher.undecided for watcher in self._watchers)
        decided = len(self._held) - undecided
        out, self._held = self._held[:decided], self._held[decided:]
        return out, False

    def flush(self) -> str:
        """Return the text that was held back, once no more text can arrive."""
        out, self._held = self._held, ""
        return out


class StopRules:
    """Stop strings and expressions of one request, at least one. Shared by its responses."""

    def __init__(self, strings: Sequence[str], expressions: Automaton | None = None) -> None:
        self._strings = _Prefix(strings) if strings else None
        self._expressions = expressions

    def begin(self) -> StopConditions:
        """Return the state of one response."""
        watchers: list[StopStrings | StopExpressions] = []
        if self._strings is not None:
            watchers.append(StopStrings(self._strings))
        if self._expressions is not None:
            watchers.append(StopExpressions(self._expressions))
        return StopConditions(watchers)


class _Prefix:
    """A prefix of some stop strings: a state of their automaton (Aho and Corasick 1975).

    States are made when a text first reaches them, so unused strings cost nothing. A text makes at
    most one state per character.

    Attributes:
        length: length of the prefix in characters.
        found: length of the longest stop string that the prefix ends with. 0: none.

    Args:
        strings: stop strings that begin with the prefix.
        shorter: longest other prefix that this one ends with. None: this one is empty.
    """

    __slots__ = ("_longer", "_shorter", "_strings", "found", "length")

    def __init__(
        self, strings: Sequence[str], length: int = 0, shorter: "_Prefix | None" = None
    ) -> None:
        self.length = length
        self._strings = strings
        self._shorter = shorter
        self._longer: dict[str, _Prefix] = {}
        whole = length and any(len(string) == length for string in strings)
        self.found: int = length if whole else 0 if shorter is None else shorter.found

    def then(self, character: str) -> "_Prefix":
        """Return the longest prefix that a text ends with after one more character."""
        prefix = self
        while (longer := prefix._continued(character)) is None:
            if prefix._shorter is None:
                return prefix
            prefix = prefix._shorter
        return longer

    def _continued(self, character: str) -> "_Prefix | None":
        known = self._longer.get(character)
        if known is not None:
            return known
        place = self.length
        strings = [each for each in self._strings if each[place : place + 1] == character]
        if not strings:
            return None
        shorter = self if self._shorter is None else self._shorter.then(character)
        longer = self._longer[character] = _Prefix(strings, place + 1, shorter)
        return longer


class StopStrings:
    """Follows one text character by character, and finds the stop strings in it."""

    def __init__(self, nothing: _Prefix) -> None:
        self._prefix = nothing

    @property
    def undecided(self) -> int:
        """Return how many characters at the end of the text may be the start of a match."""
        return self._prefix.length

    def advance(self, character: str) -> int:
        """Return the length of the longest match that ends with the character, 0 without one."""
        self._prefix = self._prefix.then(character)
        return self._prefix.found


class StopExpressions:
    """Follows one text as StopStrings does, and finds the stop expressions in it.

    It follows the positions of all begun matches, but not where they began. Beginnings are found by
    following the text backwards: when a match is complete, and whenever the text has doubled since
    the last search, so that a character costs few steps.
    """

    def __init__(self, automaton: Automaton) -> None:
        self._automaton = automaton
        self._live = 0  # positions of begun matches that may read the next character
        self._place = TEXT_START  # context before the next character
        self._length = 0  # of the text
        # The end of the text, from the earliest character at which a live match may have begun.
        self._recent: list[str] = []
        self._first_place = TEXT_START  # context before that character
        self._search_at = 0  # size of `_recent` at which the next search runs

    @property
    def undecided(self) -> int:
        return len(self._recent)

    def advance(self, character: str) -> int:
        automaton, place = self._automaton, self._place
        if not self._live:
            self._first_place = place
            self._search_at = 2
        read = (self._live | automaton.first[place]) & automaton.accepting(character)
        self._length += 1
        self._place = LINE_START if character == "\n" else MIDDLE
        if not read:
            self._live = 0
            self._recent.clear()
            return 0
        self._recent.append(character)
        self._live = live = automaton.after(read, character)
        if live & automaton.end:
            return len(self._recent) - self._begun(automaton.end)
        if len(self._recent) >= self._search_at:
            self._forget(self._begun(live))
            self._search_at = 2 * len(self._recent)
        too_old = len(self._recent) - MAX_MATCH_CHARACTERS
        if too_old > 0 and not self._length % _FORGETS_EVERY:
            self._forget(too_old)
            self._live = self._followed()
        return 0

    def _begun(self, positions: int) -> int:
        """Return the index in `_recent` where the oldest match with these positions began."""
        automaton, recent = self._automaton, self._recent
        begun = len(recent)
        for index in range(len(recent) - 1, -1, -1):
            positions = automaton.before(positions, recent[index]) & automaton.accepting(
                recent[index]
            )
            if not positions:
                break
            if positions & automaton.first[self._place_before(index)]:
                begun = index
        return begun

    def _place_before(self, index: int) -> int:
        if not index:
            return self._first_place
        return LINE_START if self._recent[index - 1] == "\n" else MIDDLE

    def _forget(self, count: int) -> None:
        """Drop that many characters of `_recent`."""
        self._first_place = self._place_before(count)
        del self._recent[:count]

    def _followed(self) -> int:
        """Return the live positions of matches that have begun within `_recent`."""
        automaton, live = self._automaton, 0
        for index, character in enumerate(self._recent):
            read = (live | automaton.first[self._place_before(index)]) & automaton.accepting(
                character
            )
            live = automaton.after(read, character)
        return live
