"""What form an answer is to have: a schema, an expression or a grammar, in its own language."""

from collections.abc import Mapping
from typing import Any

import msgspec

from common.errors import InvalidRequest
from protos import sampling_pb2 as pb

MAX_GUIDE_CHARACTERS = 64 << 10
KINDS = ("json_schema", "json_object", "regex", "ebnf", "structural_tag")


class Guide(msgspec.Struct, frozen=True):
    kind: str  # one of KINDS
    text: str  # of a json_object: nothing


class Prepared(msgspec.Struct, frozen=True):
    """A guide as it is compiled: a text that the compiler keeps to entirely.

    Attributes:
        kind: of the guide.
        has_tokens: it is a structural tag that names tokens.
    """

    kind: str
    text: str
    has_tokens: bool = False


JSON_OBJECT = Guide("json_object", "")


def tag(form: Mapping[str, Any]) -> Guide:
    """A structural tag of that format."""
    said = {"type": "structural_tag", "format": form}
    return Guide("structural_tag", msgspec.json.encode(said).decode())


def as_form(guide: Guide) -> Mapping[str, Any] | None:
    """Its format within a structural tag; None: it is such a tag, or no JSON."""
    match guide.kind:
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "json_schema":
            try:
                msgspec.json.decode(guide.text)
            except (msgspec.DecodeError, RecursionError):
                return None
            return {"type": "json_schema", "json_schema": msgspec.Raw(guide.text.encode())}
        case "regex":
            return {"type": "regex", "pattern": guide.text}
        case "ebnf":
            return {"type": "grammar", "grammar": guide.text}
        case _:
            return None


def from_proto(proto: pb.Guide) -> Guide:
    """Raises InvalidRequest: there is nothing in it."""
    match proto.WhichOneof("form"):
        case None:
            raise InvalidRequest("sampling.guide says no form")
        case "json_object":
            return JSON_OBJECT
        case kind:
            return Guide(kind, getattr(proto, kind))


def to_fields(guide: Guide) -> dict[str, object]:
    """The fields of the wire form."""
    return {guide.kind: True if guide.kind == "json_object" else guide.text}


def check(guide: Guide) -> None:
    """Raises InvalidRequest for one that is too long. Whether it means anything, only those who
    compile it can say."""
    if len(guide.text) > MAX_GUIDE_CHARACTERS:
        raise InvalidRequest(
            f"sampling.guide has {len(guide.text)} characters, {MAX_GUIDE_CHARACTERS} allowed"
        )
    if guide.kind != "json_object" and not guide.text:
        raise InvalidRequest(f"sampling.guide has an empty {guide.kind}")
