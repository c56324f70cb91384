"""Merging of two schemas into one, for `allOf` and for keywords next to a reference or `anyOf`.

Nested schemas are not merged here. They become an `allOf`, which is merged when the rewriting
reaches it.
"""

import math
from collections.abc import Callable
from typing import Any

from engine.grammar.schemas.words import (
    OF_TYPE,
    SILENT,
    Schema,
    UnsatisfiableSchema,
    common_type,
    key_of,
    refuse,
    types_of,
    values_of,
)

_MAX_BRANCHES = 256
_TIGHTER: dict[str, Callable[..., Any]] = {
    "minimum": max,
    "exclusiveMinimum": max,
    "maximum": min,
    "exclusiveMaximum": min,
    "minLength": max,
    "maxLength": min,
    "minItems": max,
    "maxItems": min,
    "minProperties": max,
    "maxProperties": min,
    "required": lambda one, other: list(dict.fromkeys((*one, *other))),
}
_WHOLE_OBJECT = frozenset({"properties", "patternProperties", "additionalProperties"})
_WHOLE_ARRAY = frozenset({"items", "prefixItems"})
_HEADS = frozenset({"type", "const", "enum"})


def merged(one: Schema, other: Schema, place: str) -> dict[str, Any]:
    """Return the conjunction of two schemas.

    Args:
        one, other: neither has a reference or an `allOf` at its top.
    Raises:
        UnsatisfiableSchema: no value is valid in both.
        InvalidRequest: the conjunction cannot be written as one schema.
    """
    one, other = _said(one), _said(other)
    made: dict[str, Any] = _heads(one, other, place)
    if _WHOLE_OBJECT & one.keys() and _WHOLE_OBJECT & other.keys():
        made |= _objects(one, other, place)
    if _WHOLE_ARRAY & one.keys() and _WHOLE_ARRAY & other.keys():
        made |= _arrays(one, other, place)
    done = made.keys() | _HEADS
    for word in [*one, *(word for word in other if word not in one)]:
        if word in done:
            continue
        if word not in one or word not in other or one[word] == other[word]:
            made[word] = one[word] if word in one else other[word]
        else:
            made[word] = _both(word, one[word], other[word], place)
    return made


def _said(schema: Schema) -> Schema:
    return {word: value for word, value in schema.items() if word not in SILENT}


def _heads(one: Schema, other: Schema, place: str) -> dict[str, Any]:
    """Return the types and values that both schemas allow."""
    made: dict[str, Any] = {}
    first, second = values_of(one), values_of(other)
    if first is not None or second is not None:
        values = first if first is not None else second
        assert values is not None
        if first is not None and second is not None:
            known = {key_of(value) for value in second}
            values = [value for value in first if key_of(value) in known]
        if not values:
            raise UnsatisfiableSchema(f"{place}: no value is valid in all combined schemas")
        made["enum"] = values
    if "type" in one or "type" in other:
        types = _common(_types(one, place), _types(other, place))
        if not types:
            raise UnsatisfiableSchema(f"{place}: no type is valid in all combined schemas")
        made["type"] = types
    return made


def _types(schema: Schema, place: str) -> tuple[str, ...] | None:
    """Return the schema's explicit types, or None. Implied types do not restrict values of other
    types."""
    has_type = "type" in schema or values_of(schema) is not None
    return types_of(schema, place) if has_type else None


def _common(one: tuple[str, ...] | None, other: tuple[str, ...] | None) -> list[str]:
    if one is None or other is None:
        return list(one or other or ())
    pairs = (common_type(mine, others) for mine in one for others in other)
    return list(dict.fromkeys(each for each in pairs if each is not None))


def _objects(one: Schema, other: Schema, place: str) -> dict[str, Any]:
    if "patternProperties" in one or "patternProperties" in other:
        raise refuse(place, "patternProperties of combined schemas cannot be enforced")
    mine, others = one.get("properties", {}), other.get("properties", {})
    required = {*one.get("required", ()), *other.get("required", ())}
    properties: dict[str, Any] = {}
    for name in [*mine, *(name for name in others if name not in mine)]:
        parts = [
            schema["properties"][name]
            if name in schema.get("properties", {})
            else schema.get("additionalProperties", True)
            for schema in (one, other)
        ]
        if False not in parts:
            properties[name] = _all_of(*parts)
        elif name in required:
            raise UnsatisfiableSchema(f"{place}: property {name!r} is required, but not allowed")
    made: dict[str, Any] = {"properties": properties}
    if "additionalProperties" in one or "additionalProperties" in other:
        parts = [schema.get("additionalProperties", True) for schema in (one, other)]
        made["additionalProperties"] = False if False in parts else _all_of(*parts)
    return made


def _arrays(one: Schema, other: Schema, place: str) -> dict[str, Any]:
    if "prefixItems" in one or "prefixItems" in other:
        raise refuse(place, "prefixItems cannot be combined with items of another schema")
    return {"items": _all_of(one["items"], other["items"])}


def _all_of(one: Any, other: Any) -> Any:
    if one == other or other is True:
        return one
    return other if one is True else {"allOf": [one, other]}


def _both(word: str, one: Any, other: Any, place: str) -> Any:
    if (tighter := _TIGHTER.get(word)) is not None and type(one) is not bool:
        return tighter(one, other)
    if word == "multipleOf" and isinstance(one, int) and isinstance(other, int):
        return math.lcm(one, other)
    if word == "anyOf" and len(one) * len(other) <= _MAX_BRANCHES:
        return [_all_of(mine, others) for mine in one for others in other]
    raise refuse(place, f"several values of {word} in combined schemas cannot be enforced")


def disjoint(one: Schema, other: Schema, place: str, opened: Callable[[Any, str], Schema]) -> bool:
    """Return whether certainly no value is valid in both schemas.

    Args:
        opened: returns a schema without a reference at its top.
    """
    first, second = _types(one, place), _types(other, place)
    if first is None or second is None:
        return False
    if not _common(first, second):
        return True
    mine, others = values_of(one), values_of(other)
    if mine is not None and others is not None:
        return {key_of(value) for value in mine}.isdisjoint(map(key_of, others))
    if first != ("object",) or second != ("object",):
        return False
    if _lacks(one, other) or _lacks(other, one):
        return True
    shared = {*one.get("required", ())} & {*other.get("required", ())}
    return any(
        disjoint(opened(first, place), opened(second, place), place, opened)
        for name in shared
        if (first := one.get("properties", {}).get(name)) is not None
        and (second := other.get("properties", {}).get(name)) is not None
    )


def _lacks(one: Schema, other: Schema) -> bool:
    """Return whether `one` forbids a property that `other` requires."""
    if one.get("additionalProperties") is not False or "patternProperties" in one:
        return False
    return any(name not in one.get("properties", {}) for name in other.get("required", ()))


assert _TIGHTER.keys() <= {word for words in OF_TYPE.values() for word in words}
