"""The keywords of JSON Schema by treatment, and helpers for schemas."""

from collections.abc import Hashable, Mapping
from typing import Any

from common.errors import InvalidRequest

Schema = Mapping[str, Any]

MAX_DEPTH = 48
MAX_SCHEMAS = 4096  # nested schemas, plus each merged use of a referenced one

_LONG = 120  # maximum characters of a place in a message

# Keywords that do not restrict values. $defs only contains definitions. Unlisted keywords have no
# effect either, as the specification says.
SILENT = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated", "readOnly"}
    | {"writeOnly", "$comment", "$schema", "$id", "id", "$defs", "definitions", "$vocabulary"}
    | {"contentEncoding", "contentMediaType", "contentSchema", "nullable", "discriminator"}
)
# Keywords that no grammar of xgrammar enforces, with the values for which they have no effect.
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
    # No effect, because undeclared properties and items are never allowed here.
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


class UnsatisfiableSchema(InvalidRequest):
    """No value is valid."""


def refuse(place: str, why: str) -> InvalidRequest:
    there = place if len(place) <= _LONG else f"…{place[-_LONG:]}"
    return InvalidRequest(f"{there}: {why}")


def below(place: str, *steps: object) -> str:
    """Return the place of a nested part, as a JSON pointer."""
    said = (str(step).replace("~", "~0").replace("/", "~1") for step in steps)
    return "/".join((place, *said))


def types_of(schema: Schema, place: str) -> tuple[str, ...] | None:
    """Return the types that the schema's values may have, explicit or implied by other keywords.
    None: all types.

    Raises:
        InvalidRequest: one of them is not a JSON type.
    """
    said = schema.get("type")
    if said is not None:
        types = (said,) if isinstance(said, str) else tuple(said)
        for each in types:
            if each not in TYPES:
                raise refuse(place, f"type {each!r} is not a JSON Schema type")
        return tuple(each for each in types if each != "integer" or "number" not in types)
    if (values := values_of(schema)) is not None:
        return tuple(dict.fromkeys(map(type_of, values)))
    shown = tuple(kind for kind, words in OF_TYPE.items() if any(word in schema for word in words))
    return shown or None


def values_of(schema: Schema) -> list[Any] | None:
    """Return the values to which the schema is limited, or None if it does not list them."""
    if "const" in schema:
        return [schema["const"]]
    return None if "enum" not in schema else list(schema["enum"])


def key_of(value: Any) -> Hashable:
    """Return a hashable key that is equal exactly for equal JSON values."""
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
