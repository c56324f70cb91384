"""Conversion of arguments in plain text to JSON, by their tool's schema.

If the text is JSON of a type that the schema allows, the value is that JSON, otherwise a string.
Independent of tool call formats.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

_WORDS = {"True": "true", "False": "false", "None": "null"}  # models that know Python write these
_ANY = frozenset({"string", "number", "boolean", "null", "object", "array"})


class ArgumentTypes:
    """The argument types of one tool."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        """
        Args:
            parameters: a JSON schema. It may be invalid.
        """
        self._schema = parameters
        self._known: dict[str, frozenset[str]] = {}  # types by argument

    def are_text(self, name: str) -> bool:
        """Return whether an argument can only be a string."""
        return self._of(name) == {"string"}

    def as_json(self, name: str, text: str) -> str:
        """Return the JSON of an argument's text."""
        stripped = text.strip()
        written = _WORDS.get(stripped, stripped)
        try:
            value = msgspec.json.decode(written)
        except (ValueError, RecursionError):
            return quoted(text)
        return written if _type_of(value) in self._of(name) else quoted(text)

    def _of(self, name: str) -> frozenset[str]:
        """Return the JSON types that an argument may have."""
        if name not in self._known:
            properties = self._schema.get("properties")
            said = properties.get(name) if isinstance(properties, Mapping) else None
            self._known[name] = self._allowed(said)
        return self._known[name]

    def _allowed(self, schema: Any) -> frozenset[str]:
        found: set[str] = set()
        followed: set[str] = set()
        waiting = [schema]
        while waiting:
            match waiting.pop():
                case {"$ref": str(reference)}:
                    if reference not in followed:
                        followed.add(reference)
                        waiting.append(self._meant(reference))
                case {"type": str(name)}:
                    found.add(_plain(name))
                case {"type": [*names]}:
                    found.update(map(_plain, names))
                case {"const": value}:
                    found.add(_type_of(value))
                case {"enum": [*values]}:
                    found.update(map(_type_of, values))
                case {"anyOf": [*branches]} | {"oneOf": [*branches]}:
                    waiting += branches
                case _:
                    return _ANY
        return frozenset(found)

    def _meant(self, reference: str) -> Any:
        """Return the target of a reference within the schema, None if it does not exist."""
        found: Any = self._schema
        for step in reference.removeprefix("#").split("/")[1:]:
            found = found.get(step) if isinstance(found, Mapping) else None
        return found


def quoted(text: str) -> str:
    """Return a text as JSON."""
    return msgspec.json.encode(text).decode()


def _plain(name: object) -> str:
    return "number" if name == "integer" else str(name)


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"
