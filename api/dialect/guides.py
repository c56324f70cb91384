"""Response formats of OpenAI, vLLM and SGLang, as one Guide."""

from operator import attrgetter
from typing import Any, ClassVar, Literal

import msgspec

from api.dialect.problems import ApiError
from api.dialect.unknown_fields import Ignored
from common.requests.sampling import JSON_OBJECT, GuidedDecoding

MAX_CHOICES = 1024


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    schema: dict[str, Any]
    name: Ignored = None
    description: Ignored = None
    strict: Ignored = None  # schemas are always strict


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """A response format. The last three fields belong to structural tags of vLLM and SGLang.

    `format` is the newer form of a structural tag, `structures` and `triggers` are the older one.
    """

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's structured outputs. At most one field is set."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None


class GuideFields(msgspec.Struct, kw_only=True):
    """Fields for guided decoding. At most one is set.

    Attributes:
        where: prefix of a field's name in errors.
    """

    where: ClassVar[str] = ""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None


_given = attrgetter(*GuideFields.__struct_fields__)
_NOTHING_GIVEN = (None,) * len(GuideFields.__struct_fields__)


def form_field(fields: GuideFields) -> str:
    """Return the name of the field that asks for a response format, "" if none does."""
    given = zip(GuideFields.__struct_fields__, _given(fields), strict=True)
    return next((f"{fields.where}{name}" for name, value in given if value is not None), "")


def guide_of(fields: GuideFields) -> GuidedDecoding | None:
    """Return the guide that the fields ask for.

    Raises:
        ApiError: two fields ask for one, or a value is invalid.
    """
    if _given(fields) == _NOTHING_GIVEN:
        return None
    nested = fields.structured_outputs or StructuredOutputs()
    said = {
        "response_format": _of_format(fields.response_format),
        "structured_outputs.json": _schema(nested.json),
        "structured_outputs.regex": _guide("regex", nested.regex),
        "structured_outputs.choice": _choice("structured_outputs.choice", nested.choice),
        "structured_outputs.grammar": _guide("ebnf", nested.grammar),
        "structured_outputs.json_object": JSON_OBJECT if nested.json_object else None,
        "structured_outputs.structural_tag": _tag(nested.structural_tag),
        "guided_json": _schema(fields.guided_json),
        "guided_regex": _guide("regex", fields.guided_regex),
        "guided_choice": _choice("guided_choice", fields.guided_choice),
        "guided_grammar": _guide("ebnf", fields.guided_grammar),
        "json_schema": _schema(fields.json_schema),
        "regex": _guide("regex", fields.regex),
        "ebnf": _guide("ebnf", fields.ebnf),
        "structural_tag": _tag(fields.structural_tag),
    }
    given = {f"{fields.where}{name}": guide for name, guide in said.items() if guide is not None}
    if len(given) > 1:
        names = " and ".join(given)
        raise ApiError(400, f"{names} each say a form of the answer", param=next(iter(given)))
    return next(iter(given.values()), None)


def _of_format(wanted: ResponseFormat | None) -> GuidedDecoding | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return JSON_OBJECT
    if wanted.type == "structural_tag":
        said = msgspec.structs.asdict(wanted).items()
        return _tag({name: value for name, value in said if value is not None})
    if wanted.json_schema is None:
        where = "response_format.json_schema"
        raise ApiError(400, f"{where} is required", param=where)
    return _schema(wanted.json_schema.schema)


def _schema(schema: str | dict[str, Any] | None) -> GuidedDecoding | None:
    if schema is None or schema == "":
        return None
    text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    return GuidedDecoding("json_schema", text)


def _tag(tag: str | dict[str, Any] | None) -> GuidedDecoding | None:
    if tag is None or tag == "":
        return None
    text = tag if isinstance(tag, str) else msgspec.json.encode(tag).decode()
    return GuidedDecoding("structural_tag", text)


def _guide(kind: str, text: str | None) -> GuidedDecoding | None:
    return GuidedDecoding(kind, text) if text else None


def _choice(where: str, choices: list[str] | None) -> GuidedDecoding | None:
    if not choices:
        return None
    if len(choices) > MAX_CHOICES or not all(choices):
        sentence = f"{where} must have at most {MAX_CHOICES} texts, none of them empty"
        raise ApiError(400, sentence, param=where)
    quoted = (msgspec.json.encode(choice).decode() for choice in choices)
    return GuidedDecoding("ebnf", f"root ::= {' | '.join(quoted)}")
