"""Unsupported fields of a body, at any depth, and their error.

A record defines the supported fields. Its other fields are either `Ignored` or must ask for
`Nothing`. A client may rely on any field that it sends. Silently dropping one would return a
response that only looks like the requested one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from typing import Annotated, Any, Self

import msgspec
from msgspec import inspect

from api.dialect.ignored_fields import IgnoredFields, asks_nothing, only
from api.dialect.problems import ApiError

# Types of fields that a record lists so that they decode quickly.
Ignored = Annotated[Any, msgspec.Meta(description="Taken, and changes no answer.")]
Nothing = Annotated[None, msgspec.Meta(description="Not supported: null, or empty.")]

_IGNORED, _NOTHING = inspect.type_info(Ignored), inspect.type_info(Nothing)
_MAX_TOLD = 8
_MAX_NAME_CHARACTERS = 40  # a client may send names of any length


@dataclass(frozen=True, slots=True)
class UnknownField:
    """An unsupported field."""

    path: str
    meant: Sequence[str]  # fields that it may be a misspelling of
    ignored: bool  # the request is served as if the field were absent


@dataclass(frozen=True, slots=True)
class FieldShape:
    """The fields of a record, and of its nested records."""

    heeded: Mapping[str, "FieldShape | None"]  # None: no nested record
    ignored: frozenset[str]
    unsupported: Mapping[str, IgnoredFields]

    @classmethod
    def of(cls, record: type[msgspec.Struct], unsupported: Mapping[str, IgnoredFields]) -> Self:
        """Return the shape of a record.

        Args:
            unsupported: fields of `record` that accept only certain values.
        """
        return cls._of(inspect.type_info(record), unsupported)  # type: ignore[arg-type]

    @classmethod
    def _of(cls, record: inspect.StructType, unsupported: Mapping[str, IgnoredFields]) -> Self:
        types = {field.encode_name: field.type for field in record.fields}
        ignored = {name for name, kind in types.items() if kind == _IGNORED}
        refused = {name: only() for name, kind in types.items() if kind == _NOTHING}
        refused |= unsupported
        return cls(
            {
                name: None if (inner := _record_in(kind)) is None else cls._of(inner, {})
                for name, kind in types.items()
                if name not in ignored and name not in refused
            },
            frozenset(ignored),
            refused,
        )

    def strip(
        self, fields: dict[str, Any], ignore: bool, where: str = ""
    ) -> Iterator[UnknownField]:
        """Remove unsupported fields from `fields` and yield those that may change the response.

        Args:
            ignore: whether to ignore fields that are unknown or unsupported.
            where: the path to `fields`, as a prefix for names.
        """
        for name in list(fields):
            if name in self.heeded:
                if (inner := self.heeded[name]) is not None:
                    for path, record in _records(fields[name]):
                        yield from inner.strip(record, ignore, f"{where}{name}{path}.")
                continue
            value = fields.pop(name)
            if name in self.ignored or asks_nothing(value):
                continue
            harmless = self.unsupported.get(name)
            path = where + name[:_MAX_NAME_CHARACTERS]
            if harmless is None:
                yield UnknownField(path, tuple(self.heeded), ignore)
            elif not harmless.holds(value):
                yield UnknownField(path, (), ignore or harmless.hint)


def refusal(strangers: Iterator[UnknownField]) -> ApiError | None:
    """Return the error that names the first unsupported fields, None if there are none.

    It says if there are more.
    """
    told = list(islice(strangers, _MAX_TOLD))
    if not told:
        return None
    more = ["others"] if next(strangers, None) else []
    *others, last = [*map(_told, told), *more]
    names = f"{', '.join(others)} and {last} are" if others else f"{last} is"
    return ApiError(
        400, f"{names} not supported by this server", param=told[0].path, code="unsupported"
    )


def _told(stranger: UnknownField) -> str:
    name = stranger.path.rpartition(".")[2].lower()
    close = get_close_matches(name, stranger.meant)
    meant = max(close, key=lambda known: known[:2] == name[:2], default="")
    return f"{stranger.path} (did you mean {meant}?)" if meant else stranger.path


def _record_in(kind: inspect.Type) -> inspect.StructType | None:
    match kind:
        case inspect.StructType():
            return kind
        case inspect.ListType(item_type=inner) | inspect.Metadata(type=inner):
            return _record_in(inner)
        case inspect.UnionType(types=kinds):
            return next(filter(None, map(_record_in, kinds)), None)
        case _:
            return None


def _records(value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the nested records of a field's value, with their paths.

    A value of a wrong type has none.
    """
    match value:
        case dict():
            yield "", value
        case list():
            for number, item in enumerate(value):
                if isinstance(item, dict):
                    yield f"[{number}]", item
