"""Regular expressions as automata: sets of characters at positions with successors (Glushkov 1961).

`stops.py` follows a text along the positions.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate
from operator import or_, xor
from re import RegexFlag, _constants, _parser, error  # type: ignore[attr-defined]
from typing import Any

from common.errors import InvalidRequest

_LINE_END = ord("\n")


class Alphabet:
    """The positions that accept a character, looked up for all character sets at once.

    Each range of characters toggles its positions at its start and after its end. A lookup is one
    binary search among these places.
    """

    def __init__(self, sets: "Sequence[CharacterSet]") -> None:
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


MAX_POSITIONS = 256  # all expressions of a request, with repetitions expanded
_MAX_DEPTH = 64  # nested groups

# The context before a character, as indices into the tuples below.
MIDDLE, LINE_START, TEXT_START = range(3)


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of an expression, with an entry for each context.

    Attributes:
        empty: whether it matches there without a character.
        first: positions with which it may begin there.
        last: positions with which it may end, by the context after it, which is never a text's
            start.
    """

    empty: tuple[bool, ...]
    first: tuple[int, ...] = (0, 0, 0)
    last: tuple[int, ...] = (0, 0)


_EMPTY = _Part((True, True, True))


class Positions:
    """An automaton under construction."""

    def __init__(self) -> None:
        self.characters: list[CharacterSet] = []
        self._written: dict[tuple[str, int, int], CharacterSet] = {}  # of one expression
        self.first: tuple[int, ...] = (0, 0, 0)
        # Positions that follow (precede) a position, by the context after (before) it, and by its
        # number.
        self.after: tuple[list[int], ...] = ([], [])
        self.before: tuple[list[int], ...] = ([], [])
        self._end = self._position()  # accepts no character
        self.end = self._end.first[MIDDLE]

    def add(self, text: str) -> None:
        """Add an expression as an alternative. Raise InvalidRequest as an Automaton does."""
        try:
            parsed = _parser.parse(text)
            self._written.clear()
            if len(self.after[MIDDLE]) - 1 + _num_positions(parsed) > MAX_POSITIONS:
                raise InvalidRequest("it is too long when its repetitions are expanded")
            part = self._sequence(parsed, parsed.state.flags)
        except (error, OverflowError) as wrong:
            raise InvalidRequest(f"it is not a regular expression: {wrong}") from None
        except RecursionError:
            raise InvalidRequest("its groups are nested too deeply") from None
        if part.empty[TEXT_START]:
            raise InvalidRequest(
                "it matches the empty text, so it would end every response at once"
            )
        part = self._then(part, self._end)
        self.first = _union(self.first, part.first)

    def _sequence(self, parsed: Any, flags: int) -> _Part:
        return self._joined([self._one(str(kind), value, flags) for kind, value in parsed])

    def _joined(self, parts: Sequence[_Part]) -> _Part:
        """Join parts, in halves of equal length, so that each position takes part in few unions."""
        match parts:
            case []:
                return _EMPTY
            case [part]:
                return part
            case _:
                half = len(parts) // 2
                return self._then(self._joined(parts[:half]), self._joined(parts[half:]))

    def _then(self, left: _Part, right: _Part) -> _Part:
        for place in (MIDDLE, LINE_START):
            self._link(place, left.last[place], right.first[place])
        return _Part(
            tuple(a and b for a, b in zip(left.empty, right.empty, strict=True)),
            tuple(
                first | (right.first[place] if left.empty[place] else 0)
                for place, first in enumerate(left.first)
            ),
            tuple(
                last | (left.last[place] if right.empty[place] else 0)
                for place, last in enumerate(right.last)
            ),
        )

    def _link(self, place: int, some: int, others: int) -> None:
        """Let each of `others` follow each of `some`."""
        if some and others:
            for number in _numbers(some):
                self.after[place][number] |= others
            for number in _numbers(others):
                self.before[place][number] |= some

    def _one(self, kind: str, value: Any, flags: int) -> _Part:
        match kind:
            case "LITERAL" | "NOT_LITERAL" | "IN" | "ANY":
                part = self._position()
                self._set(kind, value, flags).positions |= part.first[MIDDLE]
                return part
            case "BRANCH":
                ways = [self._sequence(way, flags) for way in value[1]]
                return _Part(
                    tuple(map(any, zip(*(way.empty for way in ways), strict=True))),
                    _union(*(way.first for way in ways)),
                    _union(*(way.last for way in ways)),
                )
            case "SUBPATTERN":
                _, add, without, inner = value
                return self._sequence(inner, (flags | add) & ~without)
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, inner = value
                return self._repeated(least, most, inner, flags)
            case "AT" if str(value) in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
                of_lines = flags & RegexFlag.MULTILINE and str(value) == "AT_BEGINNING"
                return _Part((False, bool(of_lines), True))
            case _:
                what = str(value) if kind == "AT" else kind
                raise InvalidRequest(f"{what.lower().replace('_', ' ')} is not supported in it")

    def _repeated(self, least: int, most: int, inner: Any, flags: int) -> _Part:
        if not _num_positions(inner):  # only anchors: repetitions change nothing
            part = self._sequence(inner, flags)
            return part if least else _EMPTY
        if most == _constants.MAXREPEAT:
            parts = [self._sequence(inner, flags) for _ in range(max(least, 1))]
            for place in (MIDDLE, LINE_START):
                self._link(place, parts[-1].last[place], parts[-1].first[place])
            least = least and len(parts)
        else:
            parts = [self._sequence(inner, flags) for _ in range(most)]
        return self._joined([*parts[:least], *map(_optional, parts[least:])])

    def _set(self, kind: str, value: Any, flags: int) -> CharacterSet:
        """Return the character set of a node. A repetition copies its positions, not the set."""
        key = kind, id(value) if kind == "IN" else value, flags
        if key not in self._written:
            self._written[key] = parsed_set(kind, value, flags)
            self.characters.append(self._written[key])
        return self._written[key]

    def _position(self) -> _Part:
        bit = 1 << len(self.after[MIDDLE])
        for each in (*self.after, *self.before):
            each.append(0)
        return _Part((False, False, False), (bit, bit, bit), (bit, bit))


def _optional(part: _Part) -> _Part:
    return _Part((True, True, True), part.first, part.last)


def _union(*sets: tuple[int, ...]) -> tuple[int, ...]:
    """Unite sets of positions, place by place."""
    return tuple(reduce(or_, each) for each in zip(*sets, strict=True))


def _numbers(positions: int) -> Iterator[int]:
    while positions:
        others = positions & (positions - 1)
        yield (positions ^ others).bit_length() - 1
        positions = others


def _num_positions(parsed: Any, depth: int = 0) -> int:
    """Count positions before any are made. Raise RecursionError for deep nesting."""
    if depth > _MAX_DEPTH:
        raise RecursionError
    total = 0
    for kind, value in parsed:
        match str(kind):
            case "LITERAL" | "NOT_LITERAL" | "IN" | "ANY":
                total += 1
            case "BRANCH":
                total += sum(_num_positions(way, depth + 1) for way in value[1])
            case "SUBPATTERN":
                total += _num_positions(value[3], depth + 1)
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, inner = value
                times = max(least, 1) if most == _constants.MAXREPEAT else most
                total += times * _num_positions(inner, depth + 1)
    return total
