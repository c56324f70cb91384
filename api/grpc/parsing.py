"""Conversion of gRPC requests to the router's parameters."""

from collections.abc import Sequence
from typing import Any

import msgspec

from api.images.picture import DEFAULT_FPS, ImageInput, MediaInput, VideoInput
from api.requests.generate_params import (
    MAX_SETTINGS_BYTES,
    MAX_TOOLS,
    UNLIMITED,
    ChatPrompt,
    ChatTurn,
    EmbeddingsPrompt,
    GenerateParams,
    NoPrompt,
    PastToolCall,
    PredictionPrompt,
    Prompt,
    PromptEnding,
    RequestGroup,
    TextPrompt,
    TokenIdsPrompt,
    any_seed,
)
from common.errors import InvalidRequest, check_at_most
from common.requests.sampling import unchecked
from protos.router_pb2 import (
    ChatMessage,
    ChatMessages,
    ChatPart,
    GenerateRequest,
    Input,
    TokenizeRequest,
)


def from_request(request: GenerateRequest) -> GenerateParams:
    """Parse a generation request. Raise InvalidRequest if tools or settings are no JSON objects."""
    together = RequestGroup.of([from_prompt(request)])
    return GenerateParams(
        prompt=together.prompts[0],
        together=together,
        sampling=unchecked(request.sampling, max_tokens=UNLIMITED, seed=any_seed()),
        max_tokens_field="sampling.max_tokens" if request.sampling.HasField("max_tokens") else "",
        drawn=not request.sampling.HasField("seed"),
        stop=tuple(request.sampling.stop),
        stop_regex=tuple(request.sampling.stop_regex),
        bad_words=tuple(request.sampling.bad_words),
        label=request.request_id,
        session_id=request.session_id,
        cache_salt=request.cache_salt if request.HasField("cache_salt") else None,
        adapter=request.adapter,
        timeout_s=request.timeout_s if request.HasField("timeout_s") else None,
        priority=request.priority if request.HasField("priority") else None,
        stream_interval=request.stream_interval,
        prediction=PredictionPrompt(request.prediction) if request.prediction else None,
    )


def from_input(given: Input) -> TextPrompt | TokenIdsPrompt:
    """Parse an input. Raise InvalidRequest if it is empty."""
    match given.WhichOneof("input"):
        case "text":
            return TextPrompt(given.text)
        case "token_ids":
            return TokenIdsPrompt(given.token_ids.ids)
        case _:
            raise InvalidRequest("inputs: set text or token_ids of each")


def one_with_each(queries: Sequence[str], documents: Sequence[str]) -> list[tuple[str, str]]:
    """Pair each document with its query. Raise InvalidRequest if the numbers do not match."""
    if len(queries) == 1:
        return [(queries[0], document) for document in documents]
    if len(queries) != len(documents):
        raise InvalidRequest(f"queries has {len(queries)} texts and documents {len(documents)}")
    return list(zip(queries, documents, strict=True))


def from_prompt(request: GenerateRequest | TokenizeRequest) -> Prompt:
    """Parse a prompt. Raise InvalidRequest as `from_request` does."""
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(request.text)
        case "messages":
            return _messages(request.messages)
        case "token_ids" if isinstance(request, GenerateRequest):
            return TokenIdsPrompt(request.token_ids.ids)
        case "input_embeddings" if isinstance(request, GenerateRequest):
            given = request.input_embeddings
            return EmbeddingsPrompt(given.values, given.num_tokens)
        case _:
            fields = request.DESCRIPTOR.oneofs_by_name["prompt"].fields
            return NoPrompt(tuple(field.name for field in fields))


def _messages(sent: ChatMessages) -> ChatPrompt:
    check_at_most("messages.tools", len(sent.tools), "tools", MAX_TOOLS)
    settings = "messages.template_settings"
    check_at_most(settings, len(sent.template_settings), "characters", MAX_SETTINGS_BYTES)
    tools = [_tool(text, f"messages.tools[{n}]") for n, text in enumerate(sent.tools)]
    return ChatPrompt(
        [_turn(number, message) for number, message in enumerate(sent.messages)],
        tools,
        _object(sent.template_settings or "{}", settings),
        sent.reasoning_effort if sent.HasField("reasoning_effort") else None,
        PromptEnding.CONTINUED if sent.continue_final_message else PromptEnding.OPENED,
    )


def _turn(number: int, message: ChatMessage) -> ChatTurn:
    calls = tuple(PastToolCall(call.name, call.arguments, call.id) for call in message.tool_calls)
    parts = tuple(_part(f"messages[{number}].parts", *each) for each in enumerate(message.parts))
    if parts and message.content:
        raise InvalidRequest(f"messages[{number}]: set either content or parts")
    texts = [part for part in parts if isinstance(part, str)]
    seen = len(texts) < len(parts)
    content = message.content or "\n".join(texts)
    return ChatTurn(
        role=message.role,
        content=None if seen or (calls and not content) else content,
        parts=parts if seen else (),
        name=message.name if message.HasField("name") else None,
        reasoning=message.reasoning if message.HasField("reasoning") else None,
        tool_calls=calls,
        tool_call_id=message.tool_call_id if message.HasField("tool_call_id") else None,
    )


def _part(where: str, number: int, part: ChatPart) -> str | MediaInput:
    match part.WhichOneof("part"):
        case "text":
            return part.text
        case "image":
            return ImageInput(part.image, part.low_detail)
        case "video":
            return VideoInput(tuple(part.video.frames), part.video.fps or DEFAULT_FPS)
        case _:
            raise InvalidRequest(f"{where}[{number}] is neither a text nor an image nor a video")


def _tool(text: str, field: str) -> dict[str, Any]:
    match tool := _object(text, field):
        case {"type": "function", "function": {"name": str(), **others}}:
            if not isinstance(others.get("parameters"), dict | None):
                raise InvalidRequest(f"{field}.function.parameters must be a JSON schema")
            if not isinstance(others.get("strict"), bool | None):
                raise InvalidRequest(f"{field}.function.strict must be true or false")
            return tool
        case _:
            raise InvalidRequest(f"{field} is not a function with a name in OpenAI's format")


def _object(text: str, field: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field} is not a JSON object: {error}") from None
