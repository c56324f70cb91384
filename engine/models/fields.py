"""Typed access to a checkpoint's JSON. An invalid file or field causes one clear ConfigError."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import ConfigError


class Fields:
    """The fields of one JSON object, checked when they are read.

    null counts as absent, because transformers writes it for absent fields. `is_null` distinguishes
    the two.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    @classmethod
    def of(cls, path: Path) -> "Fields":
        """Read a file. Raise ConfigError if `path` is not a file with a JSON object."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: {error}") from error
        if type(values) is not dict:
            raise ConfigError(f"{path}: not a JSON object")
        return cls(values, str(path))

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def is_null(self, name: str) -> bool:
        """Return whether the field is null, not merely absent."""
        return name in self._values and self._values[name] is None

    def is_blank(self, name: str) -> bool:
        """Return whether the field is an empty list or object."""
        return self._values.get(name) in ([], {})

    def count(self, name: str, default: int) -> int:
        """Return an integer of at least 0."""
        value = self._get(name, default)
        if type(value) is not int or value < 0:
            raise self.wrong(name, "an integer of at least 0")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an integer of at least 1."""
        value = self._get(name, default)
        if type(value) is not int or value < 1:
            raise self.wrong(name, "a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if type(value) not in (int, float):
            raise self.wrong(name, "a number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if type(value) is not bool:
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        if type(value) is not str:
            raise self.wrong(name, "a string")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        value = self._get(name, None)
        if type(value) is not list or not all(type(item) is str for item in value):
            raise self.wrong(name, "a list of strings")
        return tuple(value)

    def counts(self, name: str) -> tuple[int, ...]:
        """Return integers of at least 0. Empty if the field is absent."""
        value = self._get(name, [])
        if type(value) is not list or not all(type(item) is int and item >= 0 for item in value):
            raise self.wrong(name, "a list of integers of at least 0")
        return tuple(value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Return one token id or a list of them as a tuple. Empty if the field is absent."""
        value = self._values.get(name)
        ids = [] if value is None else value if type(value) is list else [value]
        if not all(type(item) is int and item >= 0 for item in ids):
            raise self.wrong(name, "a token id or a list of them")
        return tuple(ids)

    def group(self, name: str) -> int:
        """Return a group size: at least 1, or -1 for a single group."""
        value = self._get(name, None)
        if type(value) is not int or (value < 1 and value != -1):
            raise self.wrong(name, "a positive integer, or -1")
        return value

    @property
    def size(self) -> int:
        return len(self._values)

    def objects(self) -> list["Fields"]:
        """Return all fields, which must be objects."""
        return [self.nested(name) for name in self._values]

    def nested(self, name: str, defaults: Mapping[str, Any] | None = None) -> "Fields":
        """Return a field that is an object, or an empty object if it is absent.

        Args:
            defaults: fields that the object may lack.
        """
        value = self._values.get(name)
        if value is None:
            value = {}
        if type(value) is not dict:
            raise self.wrong(name, "an object")
        return Fields({**(defaults or {}), **value}, f"{self._where}: {name}")

    def sorted(self) -> str:
        """Return all fields as JSON, independent of their order in the file."""
        return json.dumps(self._values, sort_keys=True)

    def wrong(self, name: str, expected: str) -> ConfigError:
        """Return the error for a field with an unexpected value."""
        value = json.dumps(self._values[name]) if name in self._values else "nothing"
        return ConfigError(f"{self._where}: {name} must be {expected}, got {value}")

    def _get(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        return default if value is None else value


def eos_token_ids(directory: Path, config: Fields) -> tuple[int, ...]:
    """Return the end-of-sequence ids of generation_config.json, or else of the configuration or its
    text model."""
    path = directory / "generation_config.json"
    generation = Fields.of(path) if path.exists() else Fields({}, str(path))
    found = (each.token_ids("eos_token_id") for each in (generation, config))
    return next(filter(None, found), ()) or config.nested("text_config").token_ids("eos_token_id")
