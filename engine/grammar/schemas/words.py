"""The words of JSON Schema, by what is done with them."""

from collections.abc import Hashable, Mapping
from typing import Any

from common.errors import InvalidRequest

Schema = Mapping[str, Any]

MAX_DEPTH = 48
MAX_SCHEMAS = 4096  # one within another, and each time that one is referred to with more beside it

_LONG = 120  # characters of a place

# What says nothing of values; $defs is only referred to. Words that are in no list of these say
# nothing either: that is what the specification says of words that it does not know.
SILENT = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated", "readOnly"}
    | {"writeOnly", "$comment", "$schema", "$id", "id", "$defs", "definitions", "$vocabulary"}
    | {"contentEncoding", "contentMediaType", "contentSchema", "nullable", "discriminator"}
)
# What no grammar of xgrammar's holds an answer to, and with which values it says nothing.
UNENFORCED: Mapping[str, tuple[Any, ...]] = {
    "not": (),
    "if": (),
    "then": (),
    "else": (),
    "contains": (),
    "minContains": (),
    "maxContains": (),
    "uniqueItems": (False,),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    # What an object or an array is not said to have it does not have here.
    "unevaluatedProperties": (False, True),
    "unevaluatedItems": (False, True),
    "$anchor": (),
    "$dynamicRef": (),
    "$dynamicAnchor": (),
    "$recursiveRef": (),
    "$recursiveAnchor": (False,),
    "extends": (),
    "disallow": (),
    "divisibleBy": (),
}
OF_TYPE: Mapping[str, tuple[str, ...]] = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
    "object": (
        "properties",
        "patternProperties",
        "additionalProperties",
        "propertyNames",
        "required",
        "minProperties",
        "maxProperties",
    ),
    "boolean": (),
    "null": (),
}
TYPES = frozenset({*OF_TYPE, "integer"})
CONSTRAINTS = frozenset(word for words in OF_TYPE.values() for word in words)


class Nothing(InvalidRequest):
    """No value at all is valid."""


def refuse(place: str, why: str) -> InvalidRequest:
    there = place if len(place) <= _LONG else f"…{place[-_LONG:]}"
    return InvalidRequest(f"{there}: {why}")


def below(place: str, *steps: object) -> str:
    """As JSON pointers are written."""
    said = (str(step).replace("~", "~0").replace("/", "~1") for step in steps)
    return "/".join((place, *said))


def types_of(schema: Schema, place: str) -> tuple[str, ...] | None:
    """Those that its values may have, said or shown by its other words; None: all of them.

    Raises:
        InvalidRequest: one is no type.
    """
    said = schema.get("type")
    if said is not None:
        types = (said,) if isinstance(said, str) else tuple(said)
        for each in types:
            if each not in TYPES:
                raise refuse(place, f"type {each!r} is none of JSON Schema")
        return tuple(each for each in types if each != "integer" or "number" not in types)
    if (values := values_of(schema)) is not None:
        return tuple(dict.fromkeys(map(type_of, values)))
    shown = tuple(kind for kind, words in OF_TYPE.items() if any(word in schema for word in words))
    return shown or None


def values_of(schema: Schema) -> list[Any] | None:
    """The only ones that it has, if it says so."""
    if "const" in schema:
        return [schema["const"]]
    return None if "enum" not in schema else list(schema["enum"])


def key_of(value: Any) -> Hashable:
    """Return what equal values of JSON have in common, and no others: to compare many at once."""
    match value:
        case bool() | None:
            return type_of(value), value
        case list():
            return "array", tuple(map(key_of, value))
        case Mapping():
            return "object", frozenset((name, key_of(each)) for name, each in value.items())
        case str():
            return "string", value
        case _:
            return "number", float(value) if isinstance(value, float) else int(value)


def type_of(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case None:
            return "null"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def common_type(one: str, other: str) -> str | None:
    if one == other or {one, other} == {"integer", "number"}:
        return "integer" if "integer" in (one, other) else one
    return None
