"""The HTTP API, from the router's own OpenAPI document."""

from collections.abc import Iterator, Mapping
from typing import Any

from common.version import VERSION
from router.api import openapi
from router.api.dialect import harmless

_HEAD = """# HTTP API

The router speaks OpenAI's API on port 8000. The same as an OpenAPI document is at `/openapi.json`
of every router.

A field that is not heeded is refused by name, and never dropped without a word: status 400, with a
sentence that names all of them and `param` the first. Three kinds are taken all the same: whatever
is null, an empty text or an empty list; fields that
[change no answer](#fields-that-change-no-answer); and values that ask for
[what happens anyway](#fields-that-are-not-supported). With `--ignore-unknown-fields` a field that
is on none of these lists is taken as if it were not there; those that are not supported are refused
all the same. gRPC needs no such rule: its messages are typed.
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
        parts.append(f"\n### {_short(name)}\n\n{schema.get('description', '')}\n\n")
        parts += _table(schema)
    return "".join(parts)


def _ignored() -> Iterator[str]:
    yield "\n## Fields that change no answer\n\nTaken, whatever they say.\n\n"
    yield "| field | |\n|---|---|\n"
    for name, why in harmless.IGNORED.items():
        yield f"| `{name}` | {why} |\n"


def _unsupported() -> Iterator[str]:
    yield (
        "\n## Fields that are not supported\n\nBeside each are the values that change nothing. "
        "Other values of a *hint* are ignored, and named in the header `baton-ignored-fields`. "
        "Other values of any other field are rejected.\n\n"
    )
    yield "| field | completions | chat |\n|---|---|---|\n"
    tables = (harmless.OF_COMPLETIONS, harmless.OF_CHATS)
    for name in sorted(set().union(*tables)):
        said = (_values(table[name]) if name in table else "" for table in tables)
        yield f"| `{name}` | {' | '.join(said)} |\n"


def _values(field: harmless.Harmless) -> str:
    return " ".join(filter(None, ("*hint*" if field.hint else "", field.said)))


def _operation(title: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f"\n## {title}\n\n{operation['summary']}\n\n"
    if body := operation.get("requestBody"):
        record = body["content"]["application/json"]["schema"]
        yield f"Takes {_kind(record)}.\n\n"
    yield "| status | |\n|---|---|\n"
    for status, response in operation["responses"].items():
        yield f"| {status} | {response['description']} |\n"


def _table(schema: Mapping[str, Any]) -> Iterator[str]:
    required = schema.get("required", ())
    yield "| field | type | |\n|---|---|---|\n"
    for name, field in schema.get("properties", {}).items():
        mark = " (required)" if name in required else ""
        yield f"| `{name}` | {_kind(field)} | {field.get('description', '')}{mark} |\n"


def _kind(schema: Mapping[str, Any]) -> str:
    match schema:
        case {"$ref": reference}:
            name = _short(reference)
            return f"[{name}](#{name.lower()})"
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
