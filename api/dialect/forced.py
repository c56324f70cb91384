"""Forced tool calls: the JSON schema of a response that consists of calls only.

Any model can write JSON under a grammar. Such a response is therefore a JSON list of calls,
whatever tool call format its model has.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from api.dialect.messages import ToolDefinition
from common.requests.sampling import GuidedDecoding

_ANY_OBJECT = {"type": "object"}
# Keywords whose values are data, and keywords that map names to schemas, where a name may equal a
# keyword.
_VALUES = frozenset({"const", "default", "enum", "example", "examples"})
_BY_NAME = frozenset(
    {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
)


def guide_of_calls(tools: Sequence[ToolDefinition], *, parallel: bool) -> GuidedDecoding:
    """Return the guide of a response that consists of tool calls.

    Args:
        tools: at least one of them is called.
        parallel: whether more than one call may be made.

    Raises:
        RecursionError: parameters are nested too deeply.
    """
    places = [f"#/items/anyOf/{n}/properties/parameters" for n in range(len(tools))]
    calls = [_call(*each) for each in zip(tools, places, strict=True)]
    schema = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": calls},
        **({} if parallel else {"maxItems": 1}),
    }
    return GuidedDecoding("json_schema", msgspec.json.encode(schema).decode())


def _call(tool: ToolDefinition, place: str) -> dict[str, Any]:
    parameters = _moved(tool.function.parameters or _ANY_OBJECT, place)
    return {
        "type": "object",
        "properties": {"name": {"enum": [tool.function.name]}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """Return a schema that has been moved to `place`, with its references adjusted."""
    match schema:
        case Mapping():
            return {word: _moved_word(word, value, place) for word, value in schema.items()}
        case [*schemas]:
            return [_moved(each, place) for each in schemas]
        case _:
            return schema


def _moved_word(word: str, value: Any, place: str) -> Any:
    if word in _VALUES:
        return value
    if word in _BY_NAME and isinstance(value, Mapping):
        return {name: _moved(each, place) for name, each in value.items()}
    if word == "$ref" and isinstance(value, str) and value.startswith("#"):
        return place + value[1:]
    return _moved(value, place)
