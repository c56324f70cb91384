"""Rewriting of a client's schema into one that xgrammar enforces completely.

xgrammar ignores some keywords of JSON Schema, at most with a message on stderr. Here each keyword
is rewritten so that it is enforced. Schemas for which that is impossible are rejected with the
place of the defect, so that every complete response is valid. A response may be restricted more
than requested: an object that lists properties has no others, and a schema with string keywords
allows only strings.
"""

import contextlib
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import msgspec

from common.errors import InvalidRequest
from engine.grammar.schemas.expressions import (
    FORMATS,
    UNENFORCED_FORMATS,
    XGRAMMAR_FORMATS,
    quotable,
)
from engine.grammar.schemas.merging import disjoint, merged
from engine.grammar.schemas.words import (
    CONSTRAINTS,
    MAX_DEPTH,
    MAX_SCHEMAS,
    OF_TYPE,
    SILENT,
    UNENFORCED,
    Schema,
    UnsatisfiableSchema,
    below,
    common_type,
    key_of,
    refuse,
    type_of,
    types_of,
    values_of,
)

_MAX_COUNTED = 128  # characters
_MAX_PAIRS = 20_000  # pairs of branches of a oneOf that are compared
_COMBINING = ("anyOf", "oneOf")


def enforced(text: str) -> str:
    """Rewrite a schema.

    Raises:
        InvalidRequest: the text is not a schema, or no grammar can enforce it. The message names
            the place.
    """
    try:
        root = msgspec.json.decode(text)
        return msgspec.json.encode(_Document(root).whole()).decode()
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"it is not valid JSON: {error}") from None
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        # A keyword has a value of the wrong type, for example a number instead of a list.
        raise InvalidRequest(f"it is not a valid JSON schema: {error}") from None


class _Document:
    """One schema with all schemas to which it refers."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._names: dict[str, str] = {}  # by pointer, including schemas that are not rewritten yet
        self._made: dict[str, Any] = {}  # by name
        self._count = 0

    def whole(self) -> dict[str, Any]:
        made = self._schema(self._root, "#", 0)
        while len(self._made) < len(self._names):
            pointer, name = list(self._names.items())[len(self._made)]
            self._made[name] = self._schema(self._target(pointer), pointer, 0)
        return {**made, "$defs": self._made} if self._made else made

    def _schema(self, schema: Any, place: str, depth: int) -> dict[str, Any]:
        self._count += 1
        if depth > MAX_DEPTH or self._count > MAX_SCHEMAS:
            raise refuse(place, "too many nested schemas")
        if isinstance(schema, Mapping) and _constraining(schema) == ["$ref"]:
            return {"$ref": f"#/$defs/{self._named(schema['$ref'], place)}"}
        schema = self._opened(schema, place)
        for word, harmless in UNENFORCED.items():
            if word in schema and schema[word] not in harmless:
                raise refuse(place, f"{word} cannot be enforced")
        for word in _COMBINING:
            if word in schema:
                return self._one_of_several(schema, word, place, depth)
        if (values := values_of(schema)) is not None:
            return {"enum": _kept(values, schema, place)}
        types = types_of(schema, place)
        if types is None:
            return {}
        made = [self._of_type(each, schema, place, depth) for each in types]
        return made[0] if len(made) == 1 else {"anyOf": made}

    def _one_of_several(self, schema: Schema, word: str, place: str, depth: int) -> dict[str, Any]:
        beside = {other: value for other, value in schema.items() if other != word}
        branches: list[tuple[Any, str]] = []
        for number, each in enumerate(schema[word]):
            there = below(place, word, number)
            alone = _constraining(beside) == []
            if alone and word == "anyOf":
                branches.append((each, there))
                continue
            with contextlib.suppress(UnsatisfiableSchema):
                branches.append((merged(beside, self._opened(each, there), there), there))
        if word == "oneOf":
            self._check_disjoint(branches, place)
        made = []
        for each, there in branches:
            with contextlib.suppress(UnsatisfiableSchema):
                made.append(self._schema(each, there, depth + 1))
        if not made:
            raise UnsatisfiableSchema(f"{place}: no branch of {word} can be valid")
        return made[0] if len(made) == 1 else {"anyOf": made}

    def _check_disjoint(self, branches: list[tuple[Any, str]], place: str) -> None:
        opened = [self._opened(each, there) for each, there in branches]
        constants, others = _constants(opened)
        if len(others) * len(opened) > _MAX_PAIRS:
            raise refuse(
                place,
                f"oneOf cannot be enforced: {len(others)} of its {len(opened)} branches are not "
                f"constants, and only {_MAX_PAIRS} pairs can be compared: use anyOf",
            )
        for second in others:
            for first in (*constants, *(each for each in others if each < second)):
                if not disjoint(opened[first], opened[second], place, self._opened):
                    low, high = sorted((first, second))
                    raise refuse(
                        place,
                        f"oneOf cannot be enforced: a value might match branches {low} and {high}: "
                        f"use anyOf",
                    )

    def _opened(self, schema: Any, place: str) -> Schema:
        """Return an equivalent schema without a reference or `allOf` at its top, with the keywords
        of the newest draft."""
        return self._open(schema, place, ())

    def _open(self, schema: Any, place: str, through: tuple[str, ...]) -> Schema:
        if schema is True:
            return {}
        if schema is False:
            raise UnsatisfiableSchema(f"{place}: the schema false allows no value")
        if not isinstance(schema, Mapping):
            raise refuse(place, "it is neither an object nor a boolean")
        schema = _newest({word: value for word, value in schema.items() if word not in SILENT})
        said = {word: value for word, value in schema.items() if word not in ("$ref", "allOf")}
        parts: list[Schema] = [said]
        if "$ref" in schema:
            pointer = schema["$ref"]
            if pointer in through or len(through) > MAX_DEPTH:
                raise refuse(place, f"$ref {pointer!r} refers to itself")
            parts.append(self._open(self._target(pointer, place), pointer, (*through, pointer)))
        for number, each in enumerate(schema.get("allOf", ())):
            parts.append(self._open(each, below(place, "allOf", number), through))
        self._count += len(parts) - 1
        if self._count > MAX_SCHEMAS:
            raise refuse(place, "too many nested schemas")
        made, *others = parts
        for each in others:
            made = merged(made, each, place)
        return made

    def _named(self, pointer: str, place: str) -> str:
        """Return the new name of the schema at the end of a chain of references."""
        through = []
        while True:
            target = self._target(pointer, place)
            if not isinstance(target, Mapping) or _constraining(target) != ["$ref"]:
                return self._names.setdefault(pointer, str(len(self._names)))
            through.append(pointer)
            pointer = target["$ref"]
            if pointer in through:
                raise refuse(place, f"$ref {pointer!r} refers to itself")

    def _target(self, pointer: str, place: str = "#") -> Any:
        if not isinstance(pointer, str) or (pointer != "#" and not pointer.startswith("#/")):
            raise refuse(place, f"$ref {pointer!r} refers outside the schema")
        found = self._root
        for step in pointer.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, Mapping) and name in found:
                found = found[name]
            else:
                raise refuse(place, f"$ref {pointer!r} does not exist")
        return found

    def _of_type(self, kind: str, schema: Schema, place: str, depth: int) -> dict[str, Any]:
        match kind:
            case "string":
                return _string(schema, place)
            case "integer":
                return _integer(schema, place)
            case "number":
                return _number(schema, place)
            case "array":
                return self._array(schema, place, depth)
            case "object":
                return self._object(schema, place, depth)
            case _:
                return {"type": kind}

    def _array(self, schema: Schema, place: str, depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {"type": "array"}
        for word in ("minItems", "maxItems"):
            if word in schema:
                made[word] = _whole(schema[word])
        if made.get("minItems", 0) > made.get("maxItems", math.inf):
            raise UnsatisfiableSchema(f"{place}: minItems is above maxItems")
        prefix = schema.get("prefixItems", [])
        if prefix:
            made["prefixItems"] = [
                self._schema(each, below(place, "prefixItems", number), depth + 1)
                for number, each in enumerate(prefix)
            ]
        # After prefixItems, further items are allowed only if minItems requires them.
        more = len(prefix) < made.get("minItems", 0) or not prefix
        items = schema.get("items", more)
        if items is False:
            made["items"] = False
        else:
            made["items"] = self._schema(items, below(place, "items"), depth + 1)
        return made

    def _object(self, schema: Schema, place: str, depth: int) -> dict[str, Any]:
        properties = dict(schema.get("properties", {}))
        patterns = dict(schema.get("patternProperties", {}))
        required = list(dict.fromkeys(schema.get("required", ())))
        names = schema.get("propertyNames", True)
        least, most = schema.get("minProperties", 0), schema.get("maxProperties")
        others = schema.get("additionalProperties", not (properties or patterns))
        if patterns and (properties or len(patterns) > 1 or others is not False):
            others = schema.get("additionalProperties", False)
            if properties or len(patterns) > 1 or others is not False:
                raise refuse(
                    place,
                    "patternProperties: only one pattern and no other properties can be enforced",
                )
        if names is not True and (properties or patterns):
            raise refuse(place, "propertyNames cannot be enforced together with properties")
        for name in required:
            if name not in properties:
                if names is not True or patterns or schema.get("additionalProperties") is False:
                    raise refuse(place, f"required has {name!r}, which is not in properties")
                properties[name] = schema.get("additionalProperties", True)
        must = set(required)
        properties = {
            name: each
            for name, each in properties.items()
            if each is not False or name in must or others is not False
        }
        if least > len(required) and (others is not False or patterns):
            raise refuse(
                place, "minProperties above the number of required needs additionalProperties false"
            )
        made: dict[str, Any] = {"type": "object"}
        if properties:
            made["properties"] = {
                name: self._schema(each, below(place, "properties", name), depth + 1)
                for name, each in properties.items()
            }
        if required:
            made["required"] = required
        if least:
            made["minProperties"] = _whole(least)
        if most is not None:
            if _whole(most) < max(least, len(required)):
                raise UnsatisfiableSchema(
                    f"{place}: maxProperties is below minProperties or required"
                )
            made["maxProperties"] = _whole(most)
        if names is not True:
            made["propertyNames"] = self._names_of(names, below(place, "propertyNames"))
        if patterns:
            made["patternProperties"] = {
                _expression(pattern, place): self._schema(
                    each, below(place, "patternProperties", pattern), depth + 1
                )
                for pattern, each in patterns.items()
            }
        if others is False:
            made["additionalProperties"] = False
        else:
            there = below(place, "additionalProperties")
            made["additionalProperties"] = self._schema(others, there, depth + 1)
        return made

    def _names_of(self, schema: Any, place: str) -> dict[str, Any]:
        opened = self._opened(schema, place)
        if _constraining(opened) not in (["pattern"], ["type", "pattern"], ["pattern", "type"]):
            raise refuse(place, "propertyNames: only pattern can be enforced")
        return {"pattern": _expression(opened["pattern"], place)}


def _constants(branches: Sequence[Schema]) -> tuple[list[int], list[int]]:
    """Return the branches whose values no earlier branch has, and all other branches."""
    seen: set[Hashable] = set()
    constants, others = [], []
    for number, branch in enumerate(branches):
        values = values_of(branch)
        keys = None if values is None else {key_of(value) for value in values}
        if keys is None or not keys.isdisjoint(seen):
            others.append(number)
        else:
            seen |= keys
            constants.append(number)
    return constants, others


def _constraining(schema: Schema) -> list[str]:
    known = (*CONSTRAINTS, *UNENFORCED, *_COMBINING, "type", "const", "enum", "$ref", "allOf")
    return [word for word in schema if word in known]


def _newest(schema: Schema) -> Schema:
    """Return the schema with keywords of older drafts replaced by the current ones."""
    made = dict(schema)
    if isinstance(made.get("items"), list):
        made["prefixItems"] = made.pop("items")
        if "additionalItems" in made:
            made["items"] = made["additionalItems"]
    made.pop("additionalItems", None)
    for word, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(made.get(exclusive), bool) and made.pop(exclusive) and word in made:
            made[exclusive] = made.pop(word)
    return made


def _kept(values: list[Any], schema: Schema, place: str) -> list[Any]:
    """Return the values of an enum that match the schema's types."""
    beside = [word for word in schema if word in CONSTRAINTS]
    if beside:
        raise refuse(place, f"{beside[0]} cannot be enforced together with enum or const")
    kept = values
    if "type" in schema:
        types = types_of(schema, place) or ()
        kept = [value for value in values if any(_is_of(value, each) for each in types)]
    if not kept:
        raise UnsatisfiableSchema(f"{place}: no value of its enum is of its type")
    return kept


def _is_of(value: Any, kind: str) -> bool:
    return common_type(type_of(value), kind) == type_of(value)


def _string(schema: Schema, place: str) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "string"}
    lengths = {word: _whole(schema[word]) for word in ("minLength", "maxLength") if word in schema}
    lengths = {word: length for word, length in lengths.items() if word == "maxLength" or length}
    if lengths.get("minLength", 0) > lengths.get("maxLength", math.inf):
        raise UnsatisfiableSchema(f"{place}: minLength is above maxLength")
    name = schema.get("format")
    if name in UNENFORCED_FORMATS:
        raise refuse(place, f"format {name!r} cannot be enforced")
    known = name in FORMATS or name in XGRAMMAR_FORMATS
    said = [*(["format"] if known else []), *(["pattern"] if "pattern" in schema else []), *lengths]
    if len(said) > 1 and said[0] in ("format", "pattern"):
        raise refuse(place, f"{said[0]} and {said[1]} cannot be enforced together")
    if name in FORMATS:
        return {**made, "pattern": quotable(FORMATS[name])}
    if known:
        return {**made, "format": name}
    if "pattern" in schema:
        return {**made, "pattern": _expression(schema["pattern"], place)}
    return {**made, **_counted(lengths)}


def _counted(lengths: Mapping[str, int]) -> Mapping[str, Any]:
    """Return length limits as a pattern, unless it would be too long for xgrammar. Masks of
    xgrammar's own length limits take tens of milliseconds each, a thousand times as long."""
    least, most = lengths.get("minLength", 0), lengths.get("maxLength")
    if not lengths or max(least, most or 0) > _MAX_COUNTED:
        return lengths
    return {"pattern": quotable(f".{{{least},{'' if most is None else most}}}")}


def _expression(pattern: str, place: str) -> str:
    try:
        return quotable(pattern)
    except InvalidRequest as error:
        raise refuse(place, f"pattern: {error}") from None


def _integer(schema: Schema, place: str) -> dict[str, Any]:
    lows = [math.ceil(schema["minimum"])] if "minimum" in schema else []
    highs = [math.floor(schema["maximum"])] if "maximum" in schema else []
    if "exclusiveMinimum" in schema:
        lows.append(math.floor(schema["exclusiveMinimum"]) + 1)
    if "exclusiveMaximum" in schema:
        highs.append(math.ceil(schema["exclusiveMaximum"]) - 1)
    made: dict[str, Any] = {"type": "integer"}
    if lows:
        made["minimum"] = max(lows)
    if highs:
        made["maximum"] = min(highs)
    if lows and highs and max(lows) > min(highs):
        raise UnsatisfiableSchema(f"{place}: its minimum is above its maximum")
    step = schema.get("multipleOf", 1)
    if step != 1:
        if int(step) != step:
            raise refuse(place, f"multipleOf {step} cannot be enforced: expected an integer")
        made["multipleOf"] = int(step)
    return made


def _number(schema: Schema, place: str) -> dict[str, Any]:
    if "multipleOf" in schema:
        return _integer(schema, place)  # stricter, and every value is valid
    return {"type": "number"} | {word: schema[word] for word in OF_TYPE["number"] if word in schema}


def _whole(number: Any) -> int:
    if isinstance(number, bool) or int(number) != number or number < 0:
        raise ValueError(f"{number!r} is not an integer of at least 0")
    return int(number)
