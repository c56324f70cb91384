"""The HTTP API, from the router's own OpenAPI document."""

from collections.abc import Iterator, Mapping
from typing import Any

from api import openapi
from api.dialect import ignored_fields
from common import VERSION

_HEAD = """# HTTP API

The router serves the OpenAI API on port 8000. It also serves this reference as an OpenAPI document
at `/openapi.json`.

A field that Baton does not support is rejected: status 400, a sentence that names all such fields,
and `param` with the first. Baton never drops a field silently. Three kinds are accepted anyway:

- null, an empty text and an empty list
- fields that [change no response](#fields-that-change-no-response)
- values that request [the default behaviour](#fields-that-are-not-supported)

With `--ignore-unknown-fields` the router ignores other fields that it does not know or support.
gRPC needs no such rule, because its messages are typed.
"""


def page() -> str:
    document = openapi.document(VERSION)
    parts = [_HEAD]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if method != "parameters":
                parts += _operation(f"{method.upper()} {path}", operation)
    parts += _ignored()
    parts += _unsupported()
    parts.append("\n## Records\n")
    for name, schema in document["components"]["schemas"].items():
        parts.append(
            f"\n### {_short(name)} {{#{_anchor(name)}}}\n\n{schema.get('description', '')}\n\n"
        )
        parts += _table(schema)
    return "".join(parts)


def _ignored() -> Iterator[str]:
    yield "\n## Fields that change no response\n\nEvery value is accepted.\n\n"
    yield "| field | reason |\n|---|---|\n"
    for name, why in ignored_fields.IGNORED.items():
        yield f"| `{name}` | {why} |\n"


def _unsupported() -> Iterator[str]:
    yield (
        "\n## Fields that are not supported\n\nThe table has the values that change nothing. "
        "Other values of a *hint* are ignored, and named in the header `baton-ignored-fields`. "
        "Other values of any other field are rejected.\n\n"
    )
    yield "| field | completions | chat |\n|---|---|---|\n"
    tables = (ignored_fields.OF_COMPLETIONS, ignored_fields.OF_CHATS)
    for name in sorted(set().union(*tables)):
        said = (_values(table[name]) if name in table else "" for table in tables)
        yield f"| `{name}` | {' | '.join(said)} |\n"


def _values(field: ignored_fields.IgnoredFields) -> str:
    return " ".join(filter(None, ("*hint*" if field.hint else "", field.said)))


def _operation(title: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f"\n## {title}\n\n{operation['summary']}\n\n"
    if body := operation.get("requestBody"):
        record = body["content"]["application/json"]["schema"]
        yield f"Request body: {_kind(record)}.\n\n"
    yield "| status | meaning |\n|---|---|\n"
    for status, response in operation["responses"].items():
        yield f"| {status} | {response['description']} |\n"


def _table(schema: Mapping[str, Any]) -> Iterator[str]:
    required = schema.get("required", ())
    yield "| field | type | description |\n|---|---|---|\n"
    for name, field in schema.get("properties", {}).items():
        mark = " (required)" if name in required else ""
        yield f"| `{name}` | {_kind(field)} | {field.get('description', '')}{mark} |\n"


def _kind(schema: Mapping[str, Any]) -> str:
    match schema:
        case {"$ref": reference}:
            return f"[{_short(reference)}](#{_anchor(reference)})"
        case {"anyOf": options}:
            kinds = dict.fromkeys(_kind(option) for option in options if _kind(option) != "null")
            return " or ".join(kinds)
        case {"type": "array", "items": items}:
            return f"list of {_kind(items)}"
        case {"type": [*kinds]}:
            return " or ".join(kind for kind in kinds if kind != "null")
        case {"type": kind, "minimum": low, "maximum": high}:
            return f"{kind}, {low} to {high}"
        case {"type": kind}:
            return str(kind)
        case {"enum": values}:
            return " or ".join(f"`{value}`" for value in values)
        case _:
            return "any"


def _short(reference: str) -> str:
    """ "#/components/schemas/router.openai.chat.Choice" -> "chat.Choice"."""
    return ".".join(reference.rpartition("/")[2].split(".")[-2:])


def _anchor(reference: str) -> str:
    return _short(reference).lower().replace(".", "-")
