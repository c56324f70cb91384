"""JSON schemas as people write them: of tools, forms, configurations and data, in old and new
drafts.

They are our own, with the variety of JSONSchemaBench. Each has a valid value that fits into a short
response.
"""

from collections.abc import Iterator
from typing import Any

TEXT: dict[str, Any] = {"type": "string", "maxLength": 6}
COUNT: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 99}
NUMBER: dict[str, Any] = {"type": "number", "minimum": -10, "maximum": 10}
FLAG: dict[str, Any] = {"type": "boolean"}
COLOUR: dict[str, Any] = {"enum": ["red", "green", "blue"]}
KINDS = {"text": TEXT, "count": COUNT, "number": NUMBER, "flag": FLAG, "colour": COLOUR}


def record(properties: dict[str, Any], *required: str, **words: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), **words}


def listed(items: Any, **words: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "maxItems": 3, **words}


def referring(name: str, meaning: Any, **words: Any) -> dict[str, Any]:
    return {"$defs": {name: meaning}, **words}


def _scalars() -> Iterator[tuple[str, Any]]:
    yield from KINDS.items()
    yield "null", {"type": "null"}
    yield "text of three at least", {"type": "string", "minLength": 3, "maxLength": 5}
    yield "empty text", {"type": "string", "maxLength": 0}
    yield "text of one length", {"type": "string", "minLength": 4, "maxLength": 4}
    for low, high in [(0, 0), (1, 9), (-5, 17), (-99, -10), (100, 1000), (-1, 0), (7, 123456)]:
        yield f"integer {low} to {high}", {"type": "integer", "minimum": low, "maximum": high}
        above, below = {"exclusiveMinimum": low - 1}, {"exclusiveMaximum": high + 1}
        yield f"integer within {low} and {high}", {"type": "integer", **above, **below}
    for low, high in [(0, 1), (-0.5, 0.5), (1.25, 99.75), (-100, -1), (0, 100)]:
        yield f"number {low} to {high}", {"type": "number", "minimum": low, "maximum": high}
        yield (
            f"number within {low} and {high}",
            {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high},
        )
    for step in (2, 5, 7, 10):
        yield f"multiples of {step}", {"type": "integer", "multipleOf": step, **_range(0, 100)}
    yield "number in steps of 5", {"type": "number", "multipleOf": 5, **_range(0, 50)}
    yield "limits that are no integers", {"type": "integer", **_range(0.5, 4.5)}
    yield (
        "exclusive as draft 4 wrote it",
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "type": "integer",
            "minimum": 3,
            "exclusiveMinimum": True,
            "maximum": 9,
        },
    )
    yield "text or null", {"type": ["string", "null"], "maxLength": 4}
    yield "integer or text", {"type": ["integer", "string"], "minimum": 5, "maxLength": 2}
    yield "number or integer", {"type": ["number", "integer"], **_range(0, 9)}
    yield "limits without a type", {"minimum": 3, "maximum": 30}
    yield "lengths without a type", {"minLength": 1, "maxLength": 3}
    yield "values", {"enum": ["a", 1, None, True, 2.5, {"x": [1]}, [1, "two"]]}
    yield "values of its type", {"type": "string", "enum": ["a", 1, "b", None]}
    yield (
        "values to quote",
        {"enum": ['say "hi"', "back\\slash", "line\nbreak", "né", "日本", "🦊"]},
    )
    yield "one value", {"const": {"a": [1, "x"], "b": None}}
    yield "one text", {"type": "string", "const": "yes"}
    yield "one integer", {"type": "integer", "const": 42}


def _range(low: float, high: float) -> dict[str, float]:
    return {"minimum": low, "maximum": high}


PATTERNS = (
    "^[a-z]{1,8}$",
    "^[A-Z]{2}-[0-9]{3}$",
    r"^\d{3}-\d{4}$",
    r"^\w{1,6}$",
    "^(foo|bar|baz)$",
    "^(?:ab){1,3}$",
    "^a|b$",
    "^(ab?c)?d$",
    r"^v\d+(\.\d+){0,2}$",
    r"^[^\s@]{1,5}@[^\s@]{1,5}$",
    "^.{2,4}$",
    r"^\S{1,4}$",
    r"^\D{2}$",
    r"^\W{1,2}$",
    "^[ -~]{1,6}$",
    "^[^a-z]{1,4}$",
    r"^[\w.-]{1,6}$",
    "^#[0-9a-fA-F]{6}$",
    r"^\+?[1-9]\d{1,8}$",
    r"^/[a-z]{1,4}(/[a-z]{1,4}){0,2}$",
    "^[éèü]{1,3}$",
    r"^\u00e9{1,2}.?$",
    "^[a-z]+?x$",
    "^([a-z]{1,2}-){2}[a-z]$",
    "ab",
    r"^$|^[0-9]{1,3}$",
    r"^(-?[0-9]{1,3}(\.[0-9]{1,2})?)$",
)
FORMATS = (
    "date",
    "time",
    "date-time",
    "ipv4",
    "ipv6",
    "email",
    "uuid",
    "hostname",
    "uri",
    "uri-reference",
    "duration",
    "json-pointer",
    "relative-json-pointer",
    "int32",
)


def _texts() -> Iterator[tuple[str, Any]]:
    for pattern in PATTERNS:
        yield f"pattern {pattern}", {"type": "string", "pattern": pattern}
    for name in FORMATS:
        yield f"format {name}", {"type": "string", "format": name, **_short(name)}


def _short(name: str) -> dict[str, int]:
    return {"maxLength": 4} if name == "int32" else {}


def _arrays() -> Iterator[tuple[str, Any]]:
    for name, kind in KINDS.items():
        yield f"list of {name}", listed(kind)
        yield f"two or three of {name}", listed(kind, minItems=2)
        yield f"list of lists of {name}", listed(listed(kind, maxItems=2), maxItems=2)
    yield "no items", {"type": "array", "maxItems": 0}
    yield "list of anything", {"type": "array", "minItems": 1, "maxItems": 2}
    yield "list that never repeats, or does", listed(COUNT, uniqueItems=False)
    yield "pair", {"type": "array", "prefixItems": [COUNT, TEXT], "minItems": 2}
    yield "pair and more", {"prefixItems": [COUNT, TEXT], "items": FLAG, "maxItems": 4}
    yield "pair and no more", {"type": "array", "prefixItems": [COUNT, TEXT], "items": False}
    yield "triple of which the last is anything", {"prefixItems": [COUNT], **_items(3)}
    yield "pair as draft 7 wrote it", {"type": "array", "items": [COUNT, FLAG]}
    yield (
        "pair and more as draft 7 wrote it",
        {"type": "array", "items": [COUNT], "additionalItems": COLOUR, "maxItems": 3},
    )
    yield "items without a type", {"items": COUNT, "maxItems": 2}


def _items(count: int) -> dict[str, int]:
    return {"minItems": count, "maxItems": count}


def _objects() -> Iterator[tuple[str, Any]]:
    for name, kind in KINDS.items():
        yield f"record of {name}", record({"value": kind}, "value")
        yield f"perhaps {name}", record({"value": kind, "note": TEXT})
        yield f"map of {name}", {"type": "object", "additionalProperties": kind, "maxProperties": 2}
        yield f"{name} with others", record({"a": kind}, "a", additionalProperties=COUNT)
    yield "nothing else", record({"a": COUNT, "b": TEXT}, "b", additionalProperties=False)
    yield "anything", {"type": "object", "maxProperties": 1}
    yield "a name without a schema", record({}, "id")
    yield "a required name that is no property", record({"a": COUNT}, "a", "id")
    yield (
        "at least two of three",
        record({"a": COUNT, "b": COUNT, "c": COUNT}, minProperties=2, additionalProperties=False),
    )
    yield "names of a pattern", {"patternProperties": {"^x[a-z]$": COUNT}, **_closed(2)}
    yield (
        "names that match",
        {"type": "object", "propertyNames": {"pattern": "^[a-z]{1,3}$"}, **_map(COUNT, 2)},
    )
    yield "names to quote", record({'a"b': COUNT, "c\nd": FLAG, "é": TEXT}, 'a"b', "c\nd", "é")
    yield "a property that must not be", record({"a": False, "b": COUNT}, "b")
    yield "properties without a type", {"properties": {"a": COUNT}, "required": ["a"]}
    yield "twelve properties", record({f"p{number}": COUNT for number in range(12)})
    yield "eight levels", _nested(8, COUNT)
    yield (
        "said with many words",
        record(
            {"a": {**COUNT, "title": "A", "description": "x", "default": 3, "examples": [1]}},
            "a",
            **{"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://x.y/z"},
            title="T",
            description="D",
        ),
    )


def _closed(most: int) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "maxProperties": most}


def _map(kind: Any, most: int) -> dict[str, Any]:
    return {"additionalProperties": kind, "maxProperties": most}


def _nested(levels: int, kind: Any) -> Any:
    return kind if not levels else record({"in": _nested(levels - 1, kind)}, "in")


CAT = record({"kind": {"const": "cat"}, "lives": COUNT}, "kind", "lives")
DOG = record({"kind": {"const": "dog"}, "name": TEXT}, "kind", "name")
NODE = record({"v": COUNT, "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}, "v")
TREE = record({"v": COUNT, "kids": listed({"$ref": "#"}, maxItems=2)}, "v")


def _combined() -> Iterator[tuple[str, Any]]:
    yield from {
        "any of two types": {"anyOf": [COUNT, TEXT]},
        "any of two records": {"anyOf": [CAT, DOG]},
        "one of two types": {"oneOf": [COUNT, TEXT]},
        "one of two tagged records": {"oneOf": [CAT, DOG]},
        "one of two by reference": {
            "$defs": {"cat": CAT, "dog": DOG},
            "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
            "discriminator": {"propertyName": "kind"},
        },
        "one of two by what they have": {
            "oneOf": [
                record({"a": COUNT}, "a", additionalProperties=False),
                record({"b": COUNT}, "b", additionalProperties=False),
            ]
        },
        "one of values": {"oneOf": [{"const": 1}, {"const": "a"}, {"enum": [2, 3]}]},
        "one name or the other": record(
            {"a": COUNT, "b": COUNT}, anyOf=[{"required": ["a"]}, {"required": ["b"]}]
        ),
        "a type beside any of": {"type": "integer", "anyOf": [_range(0, 5), _range(90, 99)]},
        "any of, where one cannot be": {"type": "string", "anyOf": [TEXT, COUNT]},
        "any of any of": {"anyOf": [{"anyOf": [COUNT, FLAG]}, {"anyOf": [TEXT, COLOUR]}]},
        "any of twice": {"anyOf": [COUNT, TEXT], "allOf": [{"anyOf": [FLAG, {"minimum": 50}]}]},
        "all of one": {"allOf": [COUNT]},
        "all of two limits": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
        "all of two records": {"allOf": [record({"a": COUNT}, "a"), record({"b": TEXT}, "b")]},
        "all of two with one name": {
            "allOf": [record({"a": {"minimum": 5}}, "a"), record({"a": COUNT})]
        },
        "more of a reference": referring(
            "base",
            record({"id": COUNT}, "id"),
            allOf=[{"$ref": "#/$defs/base"}, record({"name": TEXT}, "name")],
        ),
        "all of, one closed": {
            "allOf": [
                record({"a": COUNT, "b": COUNT}, "a", additionalProperties=False),
                record({"b": COUNT, "c": COUNT}, "b"),
            ]
        },
        "all of two lists": {"allOf": [listed(COUNT), {"items": {"minimum": 50}, "minItems": 1}]},
        "all of values": {"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}]},
        "reference": referring("a", COUNT, **{"$ref": "#/$defs/a"}),
        "reference with more beside it": referring(
            "a", COUNT, **{"$ref": "#/$defs/a", "minimum": 50, "title": "A"}
        ),
        "definitions": {"definitions": {"a": TEXT}, **listed({"$ref": "#/definitions/a"})},
        "a name with a slash": referring(
            "a/b%c", COUNT, **record({"x": {"$ref": "#/$defs/a~1b%c"}}, "x")
        ),
        "reference to a reference": {
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": COLOUR},
            **listed({"$ref": "#/$defs/a"}),
        },
        "reference to a property": record({"a": COUNT, "b": {"$ref": "#/properties/a"}}, "a", "b"),
        "list with a tail": referring("n", NODE, **{"$ref": "#/$defs/n"}),
        "tree": TREE,
        "expression": {
            "$defs": {
                "e": {
                    "anyOf": [
                        COUNT,
                        record(
                            {
                                "op": {"enum": ["+", "*"]},
                                "l": {"$ref": "#/$defs/e"},
                                "r": {"$ref": "#/$defs/e"},
                            },
                            *("op", "l", "r"),
                        ),
                    ]
                }
            },
            "$ref": "#/$defs/e",
        },
    }.items()


def _of_life() -> Iterator[tuple[str, Any]]:
    """Yield schemas as tools, forms and services use them."""
    address = record({"street": TEXT, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}}, "zip")
    person = record({"name": TEXT, "age": COUNT, "address": address}, "name", "age")
    yield from {
        "person": person,
        "people": listed(person, maxItems=2),
        "weather": record({"city": TEXT, "unit": {"enum": ["C", "F"]}}, "city", "unit"),
        "calls of tools": {
            "type": "array",
            "minItems": 1,
            "maxItems": 2,
            "items": {
                "anyOf": [
                    _call("add", record({"a": COUNT, "b": COUNT}, "a", "b")),
                    _call("say", record({"text": TEXT}, "text")),
                    _call("stop", {"type": "object", "maxProperties": 1}),
                ]
            },
        },
        "invoice": record(
            {
                "id": {"type": "string", "pattern": "^INV-[0-9]{4}$"},
                "due": {"type": "string", "format": "date"},
                "lines": listed(record({"sku": TEXT, "n": COUNT}, "sku", "n"), minItems=1),
                "paid": FLAG,
            },
            *("id", "due", "lines", "paid"),
            additionalProperties=False,
        ),
        "point": record({"lat": _degrees(90), "lon": _degrees(180)}, "lat", "lon"),
        "shape": record({"type": {"const": "Point"}, "at": _pair(NUMBER)}, "type", "at"),
        "scores": {"type": "object", "additionalProperties": NUMBER, "maxProperties": 3},
        "answer with steps": record(
            {"steps": listed(record({"why": TEXT}, "why")), "final": TEXT},
            *("steps", "final"),
            additionalProperties=False,
        ),
        "settings": record(
            {
                "server": record({"host": {"type": "string", "format": "ipv4"}, "port": COUNT}),
                "log": record({"level": {"enum": ["debug", "info"]}, "to": listed(TEXT)}, "level"),
            },
            "log",
        ),
    }.items()
    for kind, schema in KINDS.items():
        yield from {
            f"extraction of {kind}": record({"found": FLAG, "it": _or_null(schema)}, "found", "it"),
            f"page of {kind}": record({"items": listed(schema), "next": _or_null(TEXT)}, "items"),
            f"event with {kind}": record(
                {
                    "at": {"type": "string", "format": "date-time"},
                    "data": record({"v": schema}, "v"),
                },
                *("at", "data"),
            ),
            f"matrix of {kind}": listed(_pair(schema), minItems=1, maxItems=2),
            f"ranked {kind}": record({"best": schema, "others": listed(schema)}, "best", "others"),
            f"result with {kind}": {
                "oneOf": [
                    record({"ok": {"const": True}, "value": schema}, "ok", "value"),
                    record({"ok": {"const": False}, "error": TEXT}, "ok", "error"),
                ]
            },
        }.items()


def _call(name: str, parameters: Any) -> dict[str, Any]:
    properties = {"name": {"enum": [name]}, "parameters": parameters}
    return record(properties, *properties, additionalProperties=False)


def _degrees(most: int) -> dict[str, Any]:
    return {"type": "number", "minimum": -most, "maximum": most}


def _pair(kind: Any) -> dict[str, Any]:
    return {"type": "array", "items": kind, "minItems": 2, "maxItems": 2}


def _or_null(schema: Any) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


SCHEMAS: dict[str, Any] = dict(
    entry
    for family in (_scalars, _texts, _arrays, _objects, _combined, _of_life)
    for entry in family()
)
