"""Guided decoding: the required form of a response, as a schema, a regex, a grammar or a tag."""

from collections.abc import Mapping
from typing import Any

import msgspec

from common.errors import InvalidRequest
from protos import sampling_pb2 as pb

MAX_GUIDE_CHARACTERS = 64 << 10
KINDS = ("json_schema", "json_object", "regex", "ebnf", "structural_tag")


class GuidedDecoding(msgspec.Struct, frozen=True):
    kind: str  # one of KINDS
    text: str  # empty for a json_object


class Prepared(msgspec.Struct, frozen=True):
    """A guide in the form that is compiled. The compiler enforces all of it.

    Attributes:
        kind: of the guide.
        text: for the compiler.
        has_tokens: it is a structural tag that names tokens.
    """

    kind: str
    text: str
    has_tokens: bool = False


JSON_OBJECT = GuidedDecoding("json_object", "")


def tag(form: Mapping[str, Any]) -> GuidedDecoding:
    """Return a structural tag with that format."""
    said = {"type": "structural_tag", "format": form}
    return GuidedDecoding("structural_tag", msgspec.json.encode(said).decode())


def as_form(guide: GuidedDecoding) -> Mapping[str, Any] | None:
    """Return its format for use within a structural tag.

    None: it is a structural tag or invalid JSON.
    """
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


def from_proto(proto: pb.Guide) -> GuidedDecoding:
    """Parse a guide. Raises InvalidRequest if it is empty."""
    match proto.WhichOneof("form"):
        case None:
            raise InvalidRequest("sampling.guide has no kind")
        case "json_object":
            return JSON_OBJECT
        case kind:
            return GuidedDecoding(kind, getattr(proto, kind))


def to_fields(guide: GuidedDecoding) -> dict[str, object]:
    """Return the fields of the wire form."""
    return {guide.kind: True if guide.kind == "json_object" else guide.text}


def check(guide: GuidedDecoding) -> None:
    """Check the length. Raises InvalidRequest. Only the compiler can check the content."""
    if len(guide.text) > MAX_GUIDE_CHARACTERS:
        raise InvalidRequest(
            f"sampling.guide has {len(guide.text)} characters, {MAX_GUIDE_CHARACTERS} allowed"
        )
    if guide.kind != "json_object" and not guide.text:
        raise InvalidRequest(f"sampling.guide has an empty {guide.kind}")
