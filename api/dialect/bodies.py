"""Strict decoding of JSON bodies to an endpoint's record. Unsupported fields are rejected by name.

A client that asks for JSON or log-probabilities must not get a response that silently lacks them. A
body that has only supported and harmless fields is decoded once, straight into the record. Any
other body is inspected field by field, and decoded again without its harmless fields.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from itertools import islice
from operator import attrgetter
from typing import Annotated, Any, Generic, Self, TypeVar

import msgspec
from msgspec import inspect

from api.dialect.ignored_fields import IGNORED, IgnoredFields, asks_nothing, only
from api.dialect.problems import ApiError, fields_of, invalid
from api.http.messages import HttpRequest

# Types of unsupported fields. A record lists common ones, so that bodies with them decode fast.
Ignored = Annotated[Any, msgspec.Meta(description="Accepted. Has no effect on the response.")]
Nothing = Annotated[None, msgspec.Meta(description="Not supported: null, or empty.")]

_IGNORED, _NOTHING = inspect.type_info(Ignored), inspect.type_info(Nothing)
_MAX_NAMED = 8
_MAX_NAME_CHARACTERS = 40  # a client may send names of any length


# A record defines the supported fields. Its fields of type `Ignored` accept any value, those of
# type `Nothing` only null or empty ones. Other fields are rejected, because a response without a
# requested feature would only look right.
@dataclass(frozen=True, slots=True)
class UnknownField:
    """An unsupported field."""

    path: str
    meant: Sequence[str]  # supported fields that may have been meant
    ignored: bool  # the request is served without the field


@dataclass(frozen=True, slots=True)
class FieldShape:
    """Names of the supported fields of a record and its nested records."""

    supported: Mapping[str, "FieldShape | None"]  # None: has no nested record
    ignored: frozenset[str]
    unsupported: Mapping[str, IgnoredFields]

    @classmethod
    def of(cls, record: inspect.StructType, unsupported: Mapping[str, IgnoredFields]) -> Self:
        """Return the shape of a record. `unsupported`: fields that accept only certain values."""
        types = {field.encode_name: field.type for field in record.fields}
        ignored = {name for name, kind in types.items() if kind == _IGNORED}
        refused = {name: only() for name, kind in types.items() if kind == _NOTHING}
        refused |= unsupported
        return cls(
            {
                name: None if (inner := _record_in(kind)) is None else cls.of(inner, {})
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
            if name in self.supported:
                if (inner := self.supported[name]) is not None:
                    for path, record in _records(fields[name]):
                        yield from inner.strip(record, ignore, f"{where}{name}{path}.")
                continue
            value = fields.pop(name)
            if name in self.ignored or asks_nothing(value):
                continue
            harmless = self.unsupported.get(name)
            path = where + name[:_MAX_NAME_CHARACTERS]
            if harmless is None:
                yield UnknownField(path, tuple(self.supported), ignore)
            elif not harmless.holds(value):
                yield UnknownField(path, (), ignore or harmless.hint)


def refuse_unknown(unknown: Iterator[UnknownField]) -> ApiError | None:
    """Return an error that names the first unsupported fields, or None if there are none.

    The error says whether there are more.
    """
    named = list(islice(unknown, _MAX_NAMED))
    if not named:
        return None
    more = ["others"] if next(unknown, None) else []
    *others, last = [*map(_described, named), *more]
    names = f"{', '.join(others)} and {last} are" if others else f"{last} is"
    return ApiError(
        400, f"{names} not supported by this server", param=named[0].path, code="unsupported"
    )


def _described(field: UnknownField) -> str:
    name = field.path.rpartition(".")[2].lower()
    close = get_close_matches(name, field.meant)
    meant = max(close, key=lambda known: known[:2] == name[:2], default="")
    return f"{field.path} (did you mean {meant}?)" if meant else field.path


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
    """Yield the nested records of a field's value with their paths, none if its type is wrong."""
    match value:
        case dict():
            yield "", value
        case list():
            for number, item in enumerate(value):
                if isinstance(item, dict):
                    yield f"[{number}]", item


F = TypeVar("F", bound=msgspec.Struct)
D = TypeVar("D")

_PATH = re.compile(r" - at (`key` in )?`\$\.?(.*)`$")
_MISSING = re.compile(r"missing required field `(.*?)`")
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_VALUE = msgspec.json.Decoder(object)
_UNPRINTABLE = re.compile(r"[^\w.\[\]-]", re.ASCII)  # in a header
_MAX_LISTED = 16  # ignored fields in the header
# Limit of strings (including keys), objects and lists. A conversation of 4096 messages with several
# parts and hundreds of tools has fewer. Decoding this many takes 50 ms.
MAX_NAMED = 1 << 16
# Limit of all other values, which are token ids. A million take 100 ms, and twice that if the body
# must be decoded again.
MAX_NUMBERS = 1 << 20


def take_json(request: HttpRequest) -> bytes:
    """Return the request's body, and drop the request's own reference to it.

    Raises ApiError unless the content type is JSON. With other types, a web page could make its
    visitors' browsers post here.
    """
    kind = request.header("content-type").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "the body must be JSON, with content-type: application/json")
    encoding = request.header("content-encoding").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(
            415, f"the body has content-encoding {encoding[:40]!r}: send it uncompressed"
        )
    return request.take_body()


def name_ignored(request: HttpRequest, ignored: Sequence[str]) -> None:
    """Name the ignored fields in a header of the response."""
    if ignored:
        named = ", ".join(_UNPRINTABLE.sub("?", path) for path in ignored[:_MAX_LISTED])
        more = ", ..." if len(ignored) > _MAX_LISTED else ""
        request.answer_headers += (("baton-ignored-fields", named + more),)


class BodyReader(Generic[F]):
    """Reader of the bodies of one endpoint.

    Args:
        fields: the record of supported fields.
        unsupported: further known fields, with their harmless values. At least two.
        ignore_unknown: whether to ignore unknown and unsupported fields.
    """

    def __init__(
        self, fields: type[F], unsupported: Mapping[str, IgnoredFields], *, ignore_unknown: bool
    ) -> None:
        record, self._shape = _extended(fields, tuple(unsupported.items()))
        self._decoder: msgspec.json.Decoder[F] = msgspec.json.Decoder(record)
        self._ignore_unknown = ignore_unknown
        self._unsupported = tuple(unsupported.values())
        self._watched = attrgetter(*unsupported)
        self._absent = (None,) * len(unsupported)
        self.names = fields_of(record.__struct_fields__)

    def read(self, body: bytes, ignored: list[str] | None = None) -> F:
        """Decode a body.

        Args:
            ignored: receives the paths of fields that were ignored.

        Raises:
            ApiError: the body is not JSON, a field has the wrong type or an unsupported value, or
                the body would cost too much to decode.
        """
        check_structure(body)
        try:
            fields = _decoded(self._decoder, body)
        except msgspec.ValidationError:
            return self._read_closely(body, ignored)
        return fields if self._harmless(fields) else self._read_closely(body, ignored)

    def _harmless(self, fields: F) -> bool:
        watched = self._watched(fields)
        return watched == self._absent or all(
            harmless.holds(value)
            for harmless, value in zip(self._unsupported, watched, strict=True)
            if value is not None and not asks_nothing(value)
        )

    def _read_closely(self, body: bytes, ignored: list[str] | None) -> F:
        """Decode a body that may have unsupported fields."""
        try:
            raw = _decoded(_FIELDS, body)
            supported = self._shape.supported
            given = {
                name: value if supported.get(name, self) is None else _decoded(_VALUE, value)
                for name, value in raw.items()
            }
            found = self._shape.strip(given, self._ignore_unknown)
            if refusal := refuse_unknown(_meant(found, [] if ignored is None else ignored)):
                raise refusal
            return _decoded(self._decoder, msgspec.json.encode(given))
        except msgspec.ValidationError as error:
            raise _wrong_type(str(error)) from None


# Cached, because it takes milliseconds and each model of a router has its own readers.
@cache
def _extended(
    fields: type[msgspec.Struct], unsupported: tuple[tuple[str, IgnoredFields], ...]
) -> tuple[type[Any], FieldShape]:
    """Return the record with all known fields, and its shape. For the arguments see BodyReader."""
    others = dict(unsupported)
    supported = {*fields.__struct_fields__, *others}
    beside = [
        *((name, Ignored, None) for name in IGNORED if name not in supported),
        *((name, Any, None) for name in others),
    ]
    record = msgspec.defstruct(
        fields.__name__,
        beside,
        bases=(fields,),
        kw_only=True,
        forbid_unknown_fields=True,
    )
    return record, FieldShape.of(inspect.type_info(record), others)  # type: ignore[arg-type]


def _decoded(decoder: msgspec.json.Decoder[D], body: bytes | msgspec.Raw) -> D:
    """Decode JSON. Raise ApiError, or msgspec.ValidationError for JSON of the wrong types."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError:
        raise
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except ValueError as error:  # msgspec: malformed JSON. Python: invalid UTF-8
        raise ApiError(400, f"the body is not valid JSON: {error}") from None


def _meant(found: Iterator[UnknownField], ignored: list[str]) -> Iterator[UnknownField]:
    """Yield the fields that cannot be ignored. Append the paths of the others to `ignored`."""
    for field in found:
        if not field.ignored:
            yield field
        elif len(ignored) <= _MAX_LISTED:
            ignored.append(field.path)


def _wrong_type(message: str) -> ApiError:
    """Convert a msgspec message such as "Expected `int`, got `str` - at `$.n`" to an ApiError."""
    where = _PATH.search(message)
    missing = _MISSING.search(message)
    path = where[2] if where else ""
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
        return invalid(path, "is required")
    if where is None:
        return ApiError(400, f"the body is invalid: {message}")
    key = "invalid key: " if where[1] else ""
    return invalid(path, f": {key}{message[: where.start()]}")


def check_structure(body: bytes) -> None:
    """Check the number of values in a body before it is decoded.

    Two bytes of JSON can become an object of a hundred bytes: decoding megabytes of empty lists
    would block the event loop for seconds. Counting the separators of values takes milliseconds,
    and does not check that the body is valid JSON.

    Raises:
        ApiError: the body has more values than any valid request.
    """
    if len(body) <= MAX_NAMED or _fits(body):
        return
    # A string may contain any of these bytes, so only bytes outside of strings count.
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if unescaped.count(b'"') > 2 * MAX_NAMED or not _fits(b'""'.join(unescaped.split(b'"')[::2])):
        raise ApiError(
            413,
            f"the body has too many values: at most {MAX_NAMED} texts, lists and objects and "
            f"{MAX_NUMBERS} numbers are accepted",
        )


def _fits(body: bytes) -> bool:
    named = body.count(b'"') // 2 + body.count(b"[") + body.count(b"{")
    return named <= MAX_NAMED and body.count(b",") <= MAX_NAMED + MAX_NUMBERS
