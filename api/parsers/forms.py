"""Construction of structural tag formats.

Text in a tag has no special tokens, so a marker that is a special token is referred to by its id.
"""

from collections.abc import Mapping
from typing import Any

Format = Mapping[str, Any]

ANYTHING: Format = {"type": "regex", "pattern": r"[\s\S]*"}  # works beside tokens, too
SPACE: Format = {"type": "regex", "pattern": r"\s?"}


class Forms:
    """Formats for one model."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        """
        Args:
            tokens: markers that are special tokens, with their ids.
        """
        self._tokens = tokens

    def sequence(self, *elements: str | Format) -> Format:
        """Return a sequence of markers, other texts and formats."""
        return {"type": "sequence", "elements": [self.element(each) for each in elements]}

    def element(self, element: str | Format) -> Format:
        """Return the format of one marker or text. A format is returned unchanged."""
        if not isinstance(element, str):
            return element
        if element in self._tokens:
            return {"type": "token", "token": self._tokens[element]}
        return {"type": "const_string", "value": element}


def one_of(*elements: Format) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def star(content: Format) -> Format:
    return {"type": "star", "content": content}


def plus(content: Format) -> Format:
    return {"type": "plus", "content": content}


def optional(content: Format) -> Format:
    return {"type": "optional", "content": content}


def schema_form(schema: Mapping[str, Any], style: str = "json") -> Format:
    """Return the format of arguments with this schema.

    Args:
        style: how the arguments are written: json, qwen_xml or glm_xml.
    """
    return {"type": "json_schema", "json_schema": schema, "style": style}
