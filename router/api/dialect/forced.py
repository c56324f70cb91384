"""Calls that must be made: the schema of an answer that is nothing else.

Any model can write JSON under a grammar, so such an answer is a JSON list of calls, whatever format
its model has for them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from common.requests.guide import Guide
from router.api.dialect.messages import Tool
from router.api.dialect.problems import Refusal

_ANY_OBJECT = {"type": "object"}
_PLACES = frozenset({"$defs", "definitions"})  # of what is referred to


def guide_of_calls(tools: Sequence[Tool], *, parallel: bool) -> Guide:
    """
    Args:
        tools: of which at least one is called.
        parallel: whether more than one call may be made.
    Raises:
        Refusal: two tools define different things by one name.
    """
    definitions: dict[str, dict[str, Any]] = {}
    calls = []
    for number, tool in enumerate(tools):
        parameters = dict(tool.function.parameters or _ANY_OBJECT)
        for place in _PLACES & parameters.keys():
            _define(definitions.setdefault(place, {}), parameters.pop(place), number)
        calls.append(_call(tool.function.name, parameters))
    schema = {
        "type": "array",
        "minItems": 1,
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
        **({} if parallel else {"maxItems": 1}),
        **definitions,
    }
    return Guide("json_schema", msgspec.json.encode(schema).decode())


def _call(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"enum": [name]}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _define(definitions: dict[str, Any], more: Mapping[str, Any], number: int) -> None:
    """References are from the top of a schema, so what they mean has to be there."""
    for name, meaning in more.items():
        if definitions.setdefault(name, meaning) != meaning:
            where = f"tools[{number}].function.parameters"
            sentence = f"{where} defines {name!r} otherwise than a tool before it"
            raise Refusal(400, sentence, param=where)
