"""Arguments that are written as plain text, and the JSON that their tool's schema makes of them.

A value is the JSON that its text is, where the schema has a place for JSON of that type, and is a
text otherwise. Knows no format.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

_WORDS = {"True": "true", "False": "false", "None": "null"}  # as models write them that know Python
_ANY = frozenset({"string", "number", "boolean", "null", "object", "array"})


class ArgumentTypes:
    """Of one tool."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        """
        Args:
            parameters: a JSON schema, perhaps none that makes sense.
        """
        self._schema = parameters
        self._known: dict[str, frozenset[str]] = {}  # by argument

    def are_text(self, name: str) -> bool:
        """Whether nothing but a text can be that argument."""
        return self._of(name) == {"string"}

    def as_json(self, name: str, text: str) -> str:
        """What the argument's text stands for."""
        stripped = text.strip()
        written = _WORDS.get(stripped, stripped)
        try:
            value = msgspec.json.decode(written)
        except (ValueError, RecursionError):
            return quoted(text)
        return written if _type_of(value) in self._of(name) else quoted(text)

    def _of(self, name: str) -> frozenset[str]:
        """The types of JSON values that the argument may be of."""
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
        """What a reference within the schema is to; None: to nothing there."""
        found: Any = self._schema
        for step in reference.removeprefix("#").split("/")[1:]:
            found = found.get(step) if isinstance(found, Mapping) else None
        return found


def quoted(text: str) -> str:
    """A text as JSON."""
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
