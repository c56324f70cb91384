"""The content blocks of a growing Anthropic message, and the events that report them."""

from collections.abc import Iterator
from typing import Any

import msgspec

from api.dialect.event_reply import Event
from api.parsers.listener import ParsedText

Block = dict[str, Any]


class ContentBlocks:
    """Content blocks of one response. Iterators that the methods return must be exhausted."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._said: list[str] = []  # parts of the open block: its text, or the tool's input as JSON
        self._is_open = False

    def add(self, heard: ParsedText) -> Iterator[Event]:
        if heard.reasoning:
            yield from self._ensure({"type": "thinking", "thinking": "", "signature": ""})
            self._said.append(heard.reasoning)
            yield self._delta(type="thinking_delta", thinking=heard.reasoning)
        if heard.content:
            yield from self._ensure({"type": "text", "text": ""})
            self._said.append(heard.content)
            yield self._delta(type="text_delta", text=heard.content)
        for part in heard.calls:
            if part.id:
                block = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
                yield from self._begin(block)
            if part.arguments:
                self._said.append(part.arguments)
                yield self._delta(type="input_json_delta", partial_json=part.arguments)

    def close(self) -> Iterator[Event]:
        """End the open block."""
        if self._is_open:
            self._is_open = False
            said, self._said = "".join(self._said), []
            match block := self.all[-1]:
                case {"type": "tool_use"}:
                    block["input"] = _decoded(said) if said else {}
                case {"type": kind}:
                    block[kind] = said
            yield {"type": "content_block_stop", "index": len(self.all) - 1}

    def _ensure(self, block: Block) -> Iterator[Event]:
        if not self._is_open or self.all[-1]["type"] != block["type"]:
            yield from self._begin(block)

    def _begin(self, block: Block) -> Iterator[Event]:
        yield from self.close()
        self.all.append(block)
        self._is_open = True
        index = len(self.all) - 1
        yield {"type": "content_block_start", "index": index, "content_block": dict(block)}

    def _delta(self, **fields: Any) -> Event:
        return {"type": "content_block_delta", "index": len(self.all) - 1, "delta": fields}


def _decoded(text: str) -> Any:
    """Decode a tool's input.

    Return {} for text that is not valid JSON, because models may write that.
    """
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return {}
