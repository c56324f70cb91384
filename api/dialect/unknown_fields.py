"""Which fields of a body nobody heeds, wherever in it they are, and what is said of them.

A record says which fields it heeds, and of those that it names but does not heed whether they are
`Ignored` or must ask for `Nothing`. Whoever sends a field may mean it: one that would be dropped
without a word makes an answer that only looks like what was asked for.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from typing import Annotated, Any, Self

import msgspec
from msgspec import inspect

from api.dialect.ignored_fields import Harmless, asks_nothing, only
from api.dialect.problems import Refusal

# Types of fields that a record names so that they are quickly read.
Ignored = Annotated[Any, msgspec.Meta(description="Taken, and changes no answer.")]
Nothing = Annotated[None, msgspec.Meta(description="Not supported: null, or empty.")]

_IGNORED, _NOTHING = inspect.type_info(Ignored), inspect.type_info(Nothing)
_MAX_TOLD = 8
_MAX_NAME_CHARACTERS = 40  # of as many as a client cares to send


@dataclass(frozen=True, slots=True)
class Stranger:
    """A field that nobody heeds."""

    path: str
    meant: Sequence[str]  # what it may be a misspelling of
    ignored: bool  # the request is answered as if it were not there


@dataclass(frozen=True, slots=True)
class Shape:
    """The fields of a record, and of the records in it."""

    heeded: Mapping[str, "Shape | None"]  # None: there is no record in it
    ignored: frozenset[str]
    unsupported: Mapping[str, Harmless]

    @classmethod
    def of(cls, record: type[msgspec.Struct], unsupported: Mapping[str, Harmless]) -> Self:
        """
        Args:
            unsupported: of the fields of `record`, those that are read for their values alone.
        """
        return cls._of(inspect.type_info(record), unsupported)  # type: ignore[arg-type]

    @classmethod
    def _of(cls, record: inspect.StructType, unsupported: Mapping[str, Harmless]) -> Self:
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

    def strip(self, fields: dict[str, Any], ignore: bool, where: str = "") -> Iterator[Stranger]:
        """Takes out of `fields` whatever is not heeded, and names what of it may have been meant.

        Args:
            ignore: fields that are unknown or not supported are ignored.
            where: the path to `fields`, to which a name can be added.
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
                yield Stranger(path, tuple(self.heeded), ignore)
            elif not harmless.holds(value):
                yield Stranger(path, (), ignore or harmless.hint)


def refusal(strangers: Iterator[Stranger]) -> Refusal | None:
    """What is said of the first of them, and that there are more; None if there are none."""
    told = list(islice(strangers, _MAX_TOLD))
    if not told:
        return None
    more = ["others"] if next(strangers, None) else []
    *others, last = [*map(_told, told), *more]
    names = f"{', '.join(others)} and {last} are" if others else f"{last} is"
    return Refusal(
        400, f"{names} not supported by this server", param=told[0].path, code="unsupported"
    )


def _told(stranger: Stranger) -> str:
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
    """Those that a field's value has, each with its path from there; of a wrong type: none."""
    match value:
        case dict():
            yield "", value
        case list():
            for number, item in enumerate(value):
                if isinstance(item, dict):
                    yield f"[{number}]", item
