"""Regular expressions that are searched in text as it arrives, character by character.

All expressions of a request become one automaton. Each character or character set in them is a
position, and each position has the positions that may follow it. A set of positions is one integer,
and the successors of eight positions are looked up at once (Navarro and Raffinot 2001). A character
costs at most one lookup for each eight positions, for any expression and any text, and an automaton
never grows beyond its tables.

Expressions have Python's syntax. Lookaround and backreferences are rejected.
"""

from collections.abc import Sequence

from api.text.characters import Alphabet
from api.text.positions import Positions
from common.errors import InvalidRequest

MAX_EXPRESSION_CHARACTERS = 1024
MAX_ALL_CHARACTERS = 4096  # of all expressions of a request
_MAX_KNOWN = 4096  # characters whose accepting positions are cached


class Automaton:
    """All expressions of one request. Shared by its responses, and constant except for its caches.

    Attributes:
        first: positions that a match may read first, by place of its beginning.
        end: the position that marks a complete match.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        """Compile expressions.

        Raises:
            InvalidRequest: one of them is invalid or matches an empty text, or all of them are too
                long. The message begins with its index.
        """
        check_characters(texts)
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
        """Return the positions that accept the character."""
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


def check_characters(texts: Sequence[str]) -> None:
    """Raise InvalidRequest as an Automaton does, for the length of the texts only."""
    for number, text in enumerate(texts):
        if len(text) > MAX_EXPRESSION_CHARACTERS:
            raise InvalidRequest(
                f"[{number}] has {len(text)} characters, {MAX_EXPRESSION_CHARACTERS} allowed"
            )
    total = sum(map(len, texts))
    if total > MAX_ALL_CHARACTERS:
        raise InvalidRequest(f" has {total} characters, {MAX_ALL_CHARACTERS} allowed")


class _Steps:
    """The union of the successors of positions.

    Most positions of a long expression lead to their neighbour, and one shift computes all of
    these.
    """

    def __init__(self, to: Sequence[int], neighbour: int) -> None:
        """
        Args:
            neighbour: 1: the next position. -1: the previous one.
        """
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
