"""Regular expressions that are looked for in text as it comes, character by character.

An expression becomes a graph of single characters (Thompson 1968), and all ways through it are
followed at once: a character costs no more than the graph has nodes, whatever the expression. They
are written as Python writes them; what would need to look ahead, or back at what was said, is
refused.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from re import RegexFlag, _constants, _parser, error  # type: ignore[attr-defined]
from typing import Any

from common.errors import InvalidRequest

MAX_EXPRESSION_CHARACTERS = 1024
MAX_NODES = 512  # of all expressions of a request
_MAX_DEPTH = 64  # of groups within each other

Matches = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Node:
    """Takes one character that matches, or without one is passed; then goes on at any of `to`.

    matches: None: it is passed.
    at_start: passed only there: of the text ("text"), or of a line ("line").
    """

    matches: Matches | None
    to: tuple[int, ...]
    at_start: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Expression:
    """
    nodes: the last one is the end.
    """

    nodes: Sequence[Node]
    first: int

    @property
    def end(self) -> int:
        return len(self.nodes) - 1


def expression(text: str, max_nodes: int = MAX_NODES) -> Expression:
    """
    Raises:
        InvalidRequest: it is none, matches an empty text, or has more than so many nodes.
    """
    if len(text) > MAX_EXPRESSION_CHARACTERS:
        raise InvalidRequest(f"it has {len(text)} characters, {MAX_EXPRESSION_CHARACTERS} allowed")
    try:
        parsed = _parser.parse(text)
        made = _Graph(parsed.state.flags, max_nodes).whole(parsed)
    except (error, OverflowError) as wrong:
        raise InvalidRequest(f"it is no regular expression: {wrong}") from None
    except RecursionError:
        raise InvalidRequest("it has too many groups within each other") from None
    if made.end in reached(made, made.first, after="\n", at_text_start=True):
        raise InvalidRequest("it matches an empty text, which every answer begins with")
    return made


def reached(
    made: Expression, node: int, *, after: str, at_text_start: bool = False
) -> frozenset[int]:
    """Nodes that take a character, or the end, to which a way leads from `node` without one.

    Args:
        after: the character before.
    """
    starts = {"": True, "text": at_text_start, "line": at_text_start or after == "\n"}
    seen: set[int] = set()
    waiting = [node]
    while waiting:
        number = waiting.pop()
        if number not in seen:
            seen.add(number)
            each = made.nodes[number]
            if each.matches is None and starts[each.at_start]:
                waiting += each.to
    return frozenset(n for n in seen if n == made.end or made.nodes[n].matches is not None)


class _Graph:
    """Made from its end to its beginning: whoever is added knows where to go on."""

    def __init__(self, flags: int, max_nodes: int) -> None:
        self._flags = flags
        self._max_nodes = max_nodes
        self._nodes: list[Node] = []

    def whole(self, parsed: Iterable[Any]) -> Expression:
        end = self._add(None, ())
        first = self._sequence(parsed, end, self._flags, 0)
        nodes = self._nodes
        # The end comes last: numbers count from there.
        turned = [
            Node(node.matches, tuple(len(nodes) - 1 - n for n in node.to), node.at_start)
            for node in reversed(nodes)
        ]
        return Expression(turned, len(nodes) - 1 - first)

    def _add(self, matches: Matches | None, to: tuple[int, ...], at_start: str = "") -> int:
        if len(self._nodes) >= self._max_nodes:
            raise InvalidRequest("it is too long, with its repetitions written out")
        self._nodes.append(Node(matches, to, at_start))
        return len(self._nodes) - 1

    def _sequence(self, parsed: Iterable[Any], then: int, flags: int, depth: int) -> int:
        if depth > _MAX_DEPTH:
            raise RecursionError
        for kind, value in reversed(list(parsed)):
            then = self._one(str(kind), value, then, flags, depth)
        return then

    def _one(self, kind: str, value: Any, then: int, flags: int, depth: int) -> int:
        match kind:
            case "LITERAL" | "NOT_LITERAL" | "IN" | "ANY":
                return self._add(_matching(kind, value, flags), (then,))
            case "BRANCH":
                ways = tuple(self._sequence(way, then, flags, depth + 1) for way in value[1])
                return self._add(None, ways)
            case "SUBPATTERN":
                _, add, without, inner = value
                return self._sequence(inner, then, (flags | add) & ~without, depth + 1)
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, inner = value
                return self._repeated(least, most, inner, then, flags, depth + 1)
            case "AT" if str(value) in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
                of_lines = flags & RegexFlag.MULTILINE and str(value) == "AT_BEGINNING"
                return self._add(None, (then,), "line" if of_lines else "text")
            case _:
                what = str(value) if kind == "AT" else kind
                raise InvalidRequest(f"{what.lower().replace('_', ' ')} is not known in it")

    def _repeated(
        self, least: int, most: int, inner: Any, then: int, flags: int, depth: int
    ) -> int:
        if most == _constants.MAXREPEAT:
            again = self._add(None, ())
            way = self._sequence(inner, again, flags, depth)
            self._nodes[again] = Node(None, (way, then))
            then = again
        else:
            for _ in range(most - least):
                then = self._add(None, (self._sequence(inner, then, flags, depth), then))
        for _ in range(least):
            before, then = then, self._sequence(inner, then, flags, depth)
            if then == before:  # of nothing any number is nothing
                break
        return then


def _matching(kind: str, value: Any, flags: int) -> Matches:
    match kind:
        case "LITERAL":
            matches = _equal(chr(value))
        case "NOT_LITERAL":
            matches = _not(_equal(chr(value)))
        case "ANY":
            return (lambda _: True) if flags & RegexFlag.DOTALL else _not(_equal("\n"))
        case _:
            matches = _any_of(value)
    if not flags & RegexFlag.IGNORECASE:
        return matches
    return lambda sign: any(
        matches(each) for each in (sign, sign.lower(), sign.upper()) if len(each) == 1
    )


def _any_of(members: Sequence[Any]) -> Matches:
    """Of a set."""
    negated = bool(members) and str(members[0][0]) == "NEGATE"
    some = [_member(str(kind), value) for kind, value in members[negated:]]
    found: Matches = lambda sign: any(matches(sign) for matches in some)  # noqa: E731
    return _not(found) if negated else found


def _member(kind: str, value: Any) -> Matches:
    match kind:
        case "LITERAL":
            return _equal(chr(value))
        case "RANGE":
            low, high = value
            return lambda sign: low <= ord(sign) <= high
        case _:
            matches = _CATEGORIES[str(value).removeprefix("CATEGORY_").removeprefix("NOT_")]
            return _not(matches) if "NOT_" in str(value) else matches


def _equal(character: str) -> Matches:
    return lambda sign: sign == character


def _not(matches: Matches) -> Matches:
    return lambda sign: not matches(sign)


_CATEGORIES: Mapping[str, Matches] = {
    "DIGIT": str.isdecimal,
    "SPACE": str.isspace,
    "WORD": lambda sign: sign.isalnum() or sign == "_",
}
