"""Structural tags: formats with free text around or inside them, in xgrammar's notation.

Schemas and expressions inside tags are rewritten like standalone ones. Unknown formats are
rejected.

Tokens in a tag are given by id, including special tokens. All other parts are text, without special
tokens. Free text next to tokens must be an expression, because xgrammar would otherwise allow any
token in it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from common.errors import InvalidRequest
from engine.grammar.schemas import expressions
from engine.grammar.schemas.enforced import enforced

MAX_WHITESPACE = 1  # consecutive spaces between JSON tokens
_MAX_DEPTH = 32
_STYLES = ("json", "qwen_xml", "glm_xml")

Made = Callable[[Any, str, int], Any]


class EnforcedTag(msgspec.Struct, frozen=True):
    text: str
    has_tokens: bool  # whether the tag names tokens
    grammars: Sequence[str]  # grammars inside the tag, unchanged


def enforced_tag(text: str) -> EnforcedTag:
    """Rewrite a structural tag.

    Args:
        text: `{"type": "structural_tag", "format": ...}`, or the older `{"structures": [{"begin":
            ..., "schema": ..., "end": ...}], "triggers": [...]}`.
    Raises:
        InvalidRequest: the text is not a structural tag, or no grammar can enforce it. The message
            names the place.
    """
    try:
        said = msgspec.json.decode(text, type=dict[str, Any])
        made = _format(_wanted(said), "format", 0)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"it is not a JSON object: {error}") from None
    formats = [*_within(made)]
    kinds = {each["type"] for each in formats}
    has_tokens = "token" in kinds
    if has_tokens and (free := sorted(kinds & _FREE)):
        raise InvalidRequest(rf"{free[0]} cannot be combined with tokens: use the regex [\s\S]*")
    encoded = msgspec.json.encode({"type": "structural_tag", "format": made}).decode()
    grammars = [str(each.get("grammar")) for each in formats if each["type"] == "grammar"]
    return EnforcedTag(encoded, has_tokens, grammars)


def _within(made: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a rewritten format and all formats within it."""
    yield made
    for name, value in made.items():
        if _KINDS[made["type"]].get(name) in _NESTED:
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, Mapping):
                    yield from _within(each)


def _wanted(said: Mapping[str, Any]) -> Any:
    match said:
        case {"format": wanted, **others} if not others.keys() - {"type"}:
            return wanted
        case {"structures": [*structures], "triggers": triggers}:
            tags = [_structure(each, f"structures[{n}]") for n, each in enumerate(structures)]
            return {"type": "triggered_tags", "triggers": triggers, "tags": tags}
        case _:
            raise InvalidRequest("it needs format, or structures and triggers")


def _structure(said: Any, place: str) -> dict[str, Any]:
    if not isinstance(said, Mapping):
        raise InvalidRequest(f"{place} is not an object")
    return {
        "type": "tag",
        "begin": said.get("begin"),
        "content": {"type": "json_schema", "json_schema": said.get("schema") or {}},
        "end": said.get("end"),
    }


def _format(wanted: Any, place: str, depth: int) -> dict[str, Any]:
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    known = _KINDS.get(kind) if isinstance(kind, str) else None
    if known is None:
        raise InvalidRequest(f"{place}: type {str(kind)[:40]!r} is not supported")
    if depth > _MAX_DEPTH:
        raise InvalidRequest(f"{place} is nested too deeply")
    made = {"type": kind}
    for name, value in wanted.items():
        if name == "type":
            continue
        if name not in known:
            raise InvalidRequest(f"{place}: a {kind} has no {name[:40]!r}")
        made[name] = known[name](value, f"{place}.{name}", depth + 1)
    if kind == "json_schema" and made.get("style", "json") == "json":
        made["max_whitespace_cnt"] = MAX_WHITESPACE
    return made


def _formats(wanted: Any, place: str, depth: int) -> list[dict[str, Any]]:
    if not isinstance(wanted, list):
        raise InvalidRequest(f"{place} is not a list")
    return [_format(each, f"{place}[{number}]", depth) for number, each in enumerate(wanted)]


def _tags(wanted: Any, place: str, depth: int) -> list[dict[str, Any]]:
    """Rewrite formats that are tags, even without a `type`."""
    if not isinstance(wanted, list):
        raise InvalidRequest(f"{place} is not a list")
    said = [{"type": "tag"} | each if isinstance(each, dict) else each for each in wanted]
    return _formats(said, place, depth)


def _schema(wanted: Any, place: str, depth: int) -> Any:
    try:
        made = msgspec.json.decode(enforced(msgspec.json.encode(wanted).decode()))
    except InvalidRequest as error:
        raise InvalidRequest(f"{place}: {error}") from None
    return _without_control(made)


def _without_control(schema: Any) -> Any:
    """Return a rewritten schema with length limits as expressions.

    xgrammar allows control characters in strings with length limits. Free text needs line breaks,
    so here only an expression can exclude them.
    """
    match schema:
        case {"type": "string"} if schema.keys() & {"minLength", "maxLength"}:
            others = {w: v for w, v in schema.items() if w not in ("minLength", "maxLength")}
            counts = f"{schema.get('minLength', 0)},{schema.get('maxLength', '')}"
            return others | {"pattern": f'[^"\\\\]{{{counts}}}'}
        case {"const": _} | {"enum": _}:
            return schema
        case Mapping():
            return {word: _without_control(value) for word, value in schema.items()}
        case [*schemas]:
            return [_without_control(each) for each in schemas]
        case _:
            return schema


def _expression(wanted: Any, place: str, depth: int) -> Any:
    try:
        expressions.check(str(wanted))
    except InvalidRequest as error:
        raise InvalidRequest(f"{place}: {error}") from None
    return wanted


def _style(wanted: Any, place: str, depth: int) -> Any:
    if wanted not in _STYLES:
        raise InvalidRequest(f"{place} is invalid: expected {', '.join(_STYLES)}")
    return wanted


def _token(wanted: Any, place: str, depth: int) -> int:
    if type(wanted) is not int or wanted < 0:
        raise InvalidRequest(f"{place} is not a token id")
    return wanted


def _edge(wanted: Any, place: str, depth: int) -> Any:
    """Rewrite the beginning or end of a tag: text, or a token."""
    return _format(wanted, place, depth) if isinstance(wanted, Mapping) else wanted


def _as_it_is(wanted: Any, place: str, depth: int) -> Any:
    """Return the value unchanged, because xgrammar reports its errors."""
    return wanted


_FLAGS = {"at_least_one": _as_it_is, "stop_after_first": _as_it_is}
_KINDS: Mapping[str, Mapping[str, Made]] = {
    "any_text": {"excludes": _as_it_is},
    "const_string": {"value": _as_it_is},
    "grammar": {"grammar": _as_it_is},
    "json_schema": {"json_schema": _schema, "style": _style},
    "optional": {"content": _format},
    "or": {"elements": _formats},
    "plus": {"content": _format},
    "regex": {"pattern": _expression},
    "repeat": {"min": _as_it_is, "max": _as_it_is, "content": _format},
    "sequence": {"elements": _formats},
    "star": {"content": _format},
    "tag": {"begin": _edge, "content": _format, "end": _edge},
    "token": {"token": _token},
    "tags_with_separator": {"tags": _tags, "separator": _as_it_is, **_FLAGS},
    "triggered_tags": {"triggers": _as_it_is, "tags": _tags, "excludes": _as_it_is, **_FLAGS},
}
_NESTED = (_format, _formats, _tags, _edge)
_FREE = frozenset({"any_text", "triggered_tags"})
