"""/v1/messages and /v1/messages/count_tokens, and the builder of their responses."""

from collections.abc import Iterator
from typing import Any

import msgspec

from api.anthropic import fields as asked_for
from api.anthropic.fields import CountTokensFields, MessagesFields
from api.auth.client import Client
from api.dialect.fields import GenerationFields, check_multiplied, samplings
from api.dialect.generation_endpoint import (
    Dialect,
    EndpointCall,
    Event,
    EventContent,
    RequestOrigin,
)
from api.dialect.ignored_fields import OF_MESSAGES
from api.dialect.problems import ANTHROPIC, ApiError
from api.dialect.tools import chat_call, offered
from api.openai.replies import fingerprint_fields
from api.parsers.model_format import ModelFormat
from api.parsers.source import ParsedText, StreamParser
from api.requests.answer import FinalChunk, OutputChunk
from api.requests.generate_params import ChatPrompt, SharedPrompt
from api.requests.served_model import ServedModel

Block = dict[str, Any]


class ContentBlocks:
    """Content blocks of one response. The caller must exhaust the iterators that methods return."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._said: list[str] = []  # parts of the open block: text, or the tool's input as JSON
        self._is_open = False

    def add(self, parsed: ParsedText) -> Iterator[Event]:
        if parsed.reasoning:
            yield from self._ensure({"type": "thinking", "thinking": "", "signature": ""})
            self._said.append(parsed.reasoning)
            yield self._delta(type="thinking_delta", thinking=parsed.reasoning)
        if parsed.content:
            yield from self._ensure({"type": "text", "text": ""})
            self._said.append(parsed.content)
            yield self._delta(type="text_delta", text=parsed.content)
        for part in parsed.calls:
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
    """Decode a tool's input. Return {} for invalid JSON, which models may write."""
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return {}


def _call(
    fields: MessagesFields, num_bytes: int, model_format: ModelFormat, ignored: list[str]
) -> EndpointCall:
    unused = [*asked_for.unused(fields, model_format)]
    ignored += unused
    common = GenerationFields(
        stream=fields.stream,
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=fields.top_k,
        stop=fields.stop_sequences,
        cache_salt=fields.cache_salt,
        response_format=asked_for.response_format(fields),
    )
    check_multiplied(common, num_bytes)
    choice, config = fields.tool_choice, fields.output_config
    offer = offered(
        asked_for.tools(fields),
        asked_for.chosen(fields),
        model_format,
        parallel=not (choice and choice.disable_parallel_tool_use),
    )
    effort = config.effort if config and model_format.takes_effort else None
    # Clients must send max_tokens and often send a constant. Like Anthropic's models since
    # Claude 4.5, reduce it to the context and report `model_context_window_exceeded`.
    call = chat_call(
        common,
        ChatPrompt(asked_for.turns(fields), offer.shown, reasoning_effort=effort),
        samplings(
            common,
            fields.max_tokens,
            thinking_budget=None if "thinking" in unused else asked_for.thinking_budget(fields),
        ),
        offer,
        model_format,
        form_field="output_config.format" if common.response_format else "",
        reasons=fields.thinking is None or fields.thinking.type != "disabled",
    )
    stream = bool(fields.stream)

    def content(origin: RequestOrigin) -> EventContent:
        prompt = call.requests[0].prompt
        return _Message(origin, prompt, call.parser(), fields.max_tokens, stream=stream)

    return EndpointCall(fields.model, call.requests, content, stream, form=call.form)


MESSAGES = Dialect(
    "msg_",
    MessagesFields,
    OF_MESSAGES,
    _call,
    ANTHROPIC,
    {"stop": "stop_sequences", "thinking_budget": "thinking.budget_tokens"},
)


class _Message(EventContent):
    """One message."""

    def __init__(
        self,
        origin: RequestOrigin,
        prompt: SharedPrompt,
        parser: StreamParser,
        max_tokens: int,
        *,
        stream: bool,
    ) -> None:
        super().__init__(stream=stream)
        self._origin = origin
        self._prompt = prompt
        self._parser = parser
        self._max_tokens = max_tokens
        self._blocks = ContentBlocks()

    def events(self, piece: OutputChunk | FinalChunk) -> Iterator[Event]:
        if not self._parser.begun:
            yield {"type": "message_start", "message": self._message(None)}
        last = isinstance(piece, FinalChunk)
        yield from self._blocks.add(self._parser.parse(piece.text, piece.marks, last=last))
        if isinstance(piece, FinalChunk):
            yield from self._blocks.close()
            self.last = self._message(piece)
            reason = {name: self.last[name] for name in ("stop_reason", "stop_sequence")}
            delta, usage = {**reason, **fingerprint_fields(piece)}, self.last["usage"]
            yield {"type": "message_delta", "delta": delta, "usage": usage}
            yield {"type": "message_stop"}

    def failure(self, why: ApiError) -> Event:
        return {"type": "error", "error": {"type": why.kind, "message": str(why)}}

    def _message(self, last: FinalChunk | None) -> Event:
        cached = (last.usage.cached_tokens or 0) if last else 0
        return {
            "id": self._origin.id,
            "type": "message",
            "role": "assistant",
            "model": self._origin.model,
            "content": self._blocks.all,
            "stop_reason": self._reason(last) if last else None,
            "stop_sequence": _stop_sequence(last) if last else None,
            # Anthropic's input_tokens excludes cached tokens.
            "usage": {
                "input_tokens": self._prompt.rendering.num_tokens - cached,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": cached,
                "output_tokens": last.usage.completion_tokens if last else 0,
            },
            **(fingerprint_fields(last) if last else {}),
        }

    def _reason(self, last: FinalChunk) -> str:
        if last.finish_reason == "length":
            cut = last.usage.completion_tokens < self._max_tokens
            return "model_context_window_exceeded" if cut else "max_tokens"
        if _stop_sequence(last) is not None:
            return "stop_sequence"
        return "tool_use" if self._parser.has_called else "end_turn"


def _stop_sequence(last: FinalChunk) -> str | None:
    return last.stop_reason if isinstance(last.stop_reason, str) else None


class TokenCount(msgspec.Struct):
    input_tokens: int


async def count_tokens(model: ServedModel, fields: CountTokensFields, client: Client) -> TokenCount:
    """Return the response of /v1/messages/count_tokens."""
    choice = asked_for.chosen(fields)
    offer = offered(asked_for.tools(fields), choice, model.model_format, parallel=None)
    prompt = ChatPrompt(asked_for.turns(fields), offer.shown)
    return TokenCount(len(await model.prompts.encode(prompt, client)))
