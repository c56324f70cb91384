"""JSON to a record of one endpoint's fields, strictly; fields nobody knows are ignored.

Fields that are known, not supported, and would change the answer are refused by name: whoever asks
for JSON or for log-probabilities must not get an answer that only looks like what was asked for.
"""

import re
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Generic, TypeVar

import msgspec

from router.api.openai.problems import Refusal
from router.api.openai.structure import check_structure

F = TypeVar("F", bound=msgspec.Struct)

_PATH = re.compile(r" - at `\$\.?(.*)`$")
_MISSING = re.compile(r"missing required field `(.*?)`")


class BodyReader(Generic[F]):
    """Reads the bodies of one endpoint."""

    def __init__(self, fields: type[F], unsupported: Mapping[str, tuple[object, ...]]) -> None:
        """
        Args:
            unsupported: values that each field may have because they mean what happens anyway;
                null is always one.
        """
        watched = [(name, Any, None) for name in unsupported]
        record: type[F] = msgspec.defstruct(  # type: ignore[assignment]
            fields.__name__, watched, bases=(fields,), kw_only=True
        )
        self._decoder = msgspec.json.Decoder(record)
        self._unsupported = unsupported
        self._watched = attrgetter(*unsupported)
        self._absent = (None,) * len(unsupported)
        self.names = frozenset(record.__struct_fields__)

    def read(self, body: bytes) -> F:
        """
        Raises:
            Refusal: it is no JSON, a field has the wrong type, it asks for what there is not, or
                it would cost too much to decode.
        """
        check_structure(body)
        try:
            fields = self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise _wrong_type(str(error)) from None
        except RecursionError:
            raise Refusal(400, "the body is nested too deeply") from None
        except ValueError as error:  # as msgspec says it of malformed JSON, and Python of UTF-8
            raise Refusal(400, f"the body is not valid JSON: {error}") from None
        watched = self._watched(fields)
        if watched == self._absent:
            return fields
        for (name, harmless), value in zip(self._unsupported.items(), watched, strict=True):
            if value is not None and value not in harmless:
                raise Refusal(
                    400, f"{name} is not supported by this server", param=name, code="unsupported"
                )
        return fields


def _wrong_type(message: str) -> Refusal:
    """A message of msgspec: "Expected `int`, got `str` - at `$.n`"."""
    where = _PATH.search(message)
    missing = _MISSING.search(message)
    path = where[1] if where else ""
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
        return Refusal(400, f"{path} is required", param=path)
    if where is None:
        return Refusal(400, f"the body is wrong: {message}")
    return Refusal(400, f"{path}: {message[: where.start()]}", param=path)
