"""Character sets of regular expressions, looked up for all sets at once."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import xor
from re import RegexFlag
from typing import Any

_LINE_END = ord("\n")


class Alphabet:
    """The positions that accept a character, looked up for all character sets at once.

    Each range of characters toggles its positions at its start and behind its end. A lookup is one
    binary search among these places.
    """

    def __init__(self, sets: "Sequence[CharacterSet]") -> None:
        """
        Args:
            sets: the character sets, with the positions that accept them.
        """
        self._negated = self._ignores_case = 0
        self._categories: dict[str, int] = {}
        changes: dict[int, int] = {0: 0}
        for each in sets:
            for low, high in _merged(each.ranges):
                changes[low] = changes.get(low, 0) ^ each.positions
                changes[high + 1] = changes.get(high + 1, 0) ^ each.positions
            for name in each.categories:
                self._categories[name] = self._categories.get(name, 0) | each.positions
            self._negated |= each.positions if each.negated else 0
            self._ignores_case |= each.positions if each.ignores_case else 0
        self._places = sorted(changes)
        self._listed: list[int] = list(accumulate((changes[place] for place in self._places), xor))

    def accepting(self, character: str) -> int:
        """Return the positions that accept the character."""
        found = self._lists(character)
        if self._ignores_case:
            for other in (character.lower(), character.upper()):
                if len(other) == 1:
                    found |= self._lists(other) & self._ignores_case
        return found ^ self._negated

    def _lists(self, character: str) -> int:
        found = self._listed[bisect_right(self._places, ord(character)) - 1]
        for name, positions in self._categories.items():
            if _CATEGORIES[name](character):
                found |= positions
        return found


@dataclass(slots=True)
class CharacterSet:
    """A character set as written in an expression, and the positions that accept it."""

    ranges: list[tuple[int, int]] = field(default_factory=list)  # code points
    categories: list[str] = field(default_factory=list)
    negated: bool = False
    ignores_case: bool = False
    positions: int = 0


def _merged(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the ranges with overlapping ones merged."""
    begun: tuple[int, int] | None = None
    for low, high in sorted(ranges):
        if begun is None:
            begun = low, high
        elif low <= begun[1]:
            begun = begun[0], max(begun[1], high)
        else:
            yield begun
            begun = low, high
    if begun is not None:
        yield begun


def parsed_set(kind: str, value: Any, flags: int) -> CharacterSet:
    """Return the character set of a node of Python's parser: one character, any, or a set."""
    ignores_case = bool(flags & RegexFlag.IGNORECASE)
    match kind:
        case "ANY" if flags & RegexFlag.DOTALL:
            return CharacterSet(negated=True)
        case "ANY":
            return CharacterSet([(_LINE_END, _LINE_END)], negated=True)
        case "LITERAL" | "NOT_LITERAL":
            negated = kind == "NOT_LITERAL"
            return CharacterSet([(value, value)], [], negated, ignores_case)
    made = CharacterSet(ignores_case=ignores_case)
    for member, of_it in value:
        match str(member):
            case "LITERAL":
                made.ranges.append((of_it, of_it))
            case "RANGE":
                made.ranges.append(of_it)
            case "CATEGORY":
                made.categories.append(str(of_it).removeprefix("CATEGORY_"))
            case _:
                made.negated = True
    return made


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


_CATEGORIES: Mapping[str, Callable[[str], bool]] = {
    "DIGIT": str.isdecimal,
    "NOT_DIGIT": lambda character: not character.isdecimal(),
    "SPACE": str.isspace,
    "NOT_SPACE": lambda character: not character.isspace(),
    "WORD": _is_word,
    "NOT_WORD": lambda character: not _is_word(character),
}
