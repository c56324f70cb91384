"""How families of models write calls, as structural tags: free text until one begins, and then no
other way to go on than a call of a tool that there is."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from router.parsers.formats import HERMES
from router.parsers.marked import GLM45, QWEN3_CODER

# Of a tool's name and the schema of its arguments.
Tag = Callable[[str, Mapping[str, Any]], dict[str, Any]]


def _hermes(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    begin, end = HERMES
    called = msgspec.json.encode(name).decode()
    return _tag(f'{begin}\n{{"name": {called}, "arguments": ', schema, "json", f"}}\n{end}")


def _qwen3_coder(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    begin, function, _, _, function_end, end = QWEN3_CODER
    return _tag(f"{begin}\n{function}{name}>\n", schema, "qwen_xml", f"{function_end}\n{end}")


def _glm45(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    begin, *_, end = GLM45
    return _tag(f"{begin}{name}", schema, "glm_xml", end)


# By format: what a call begins with, and the tag of one.
FORMATS: Mapping[str, tuple[str, Tag]] = {
    "hermes": (HERMES[0], _hermes),
    "qwen3-coder": (QWEN3_CODER[0], _qwen3_coder),
    "glm45": (GLM45[0], _glm45),
}


def format_of_calls(
    name: str, tools: Sequence[tuple[str, Mapping[str, Any]]], *, parallel: bool
) -> dict[str, Any]:
    """
    Args:
        name: one of FORMATS.
        tools: by name, with the schema that arguments are held to.
        parallel: False: behind a call there is nothing more.
    """
    trigger, tag = FORMATS[name]
    return {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": [tag(*tool) for tool in tools],
        "stop_after_first": not parallel,
    }


def _tag(begin: str, schema: Mapping[str, Any], style: str, end: str) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": schema, "style": style}
    return {"type": "tag", "begin": begin, "content": content, "end": end}
