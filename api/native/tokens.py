"""/tokenize and /detokenize, compatible with vLLM and SGLang, without generation."""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from aiohttp import web

from api.auth.client import Client
from api.dialect.bodies import BodyReader
from api.dialect.fields import ModelName, TokenId
from api.dialect.ignored_fields import OF_DETOKENIZE, OF_TOKENIZE
from api.dialect.messages import MessageList, ToolList, conversation, shown
from api.dialect.problems import ApiError
from api.dialect.prompt_endpoint import PromptEndpoint
from api.http.request import HttpRequest
from api.requests.generate_params import Prompt, TextPrompt
from api.requests.served_model import ServedModel
from api.text.limits import MAX_CHOICES, check_context, check_vocabulary

_Texts = Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_CHOICES)]


class TokenizeFields(msgspec.Struct, kw_only=True):
    model: ModelName | None = None
    prompt: str | _Texts | None = None
    messages: MessageList | None = None
    tools: ToolList | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeFields(msgspec.Struct, kw_only=True):
    tokens: list[TokenId]
    model: ModelName | None = None


class Tokenized(msgspec.Struct):
    """Token ids of a prompt. For several prompts, each field is a list."""

    tokens: Sequence[int | Sequence[int]]
    count: int | Sequence[int]
    max_model_len: int
    token_strs: Sequence[str | Sequence[str]] | None


class Detokenized(msgspec.Struct):
    prompt: str
    text: str  # the same, by SGLang's name


class TokenizeEndpoint:
    """HTTP handlers of /tokenize and /detokenize."""

    def __init__(
        self, model: ServedModel, endpoint: PromptEndpoint, *, ignore_unknown: bool
    ) -> None:
        """
        Args:
            ignore_unknown: see BodyReader.
        """
        self._model = model
        self._endpoint = endpoint
        self._tokenize = BodyReader(TokenizeFields, OF_TOKENIZE, ignore_unknown=ignore_unknown)
        self._detokenize = BodyReader(
            DetokenizeFields, OF_DETOKENIZE, ignore_unknown=ignore_unknown
        )

    async def tokenize(self, request: HttpRequest) -> web.Response:
        return await self._endpoint.answered(request, self._tokenize, self._tokenized)

    async def detokenize(self, request: HttpRequest) -> web.Response:
        return await self._endpoint.answered(request, self._detokenize, self._detokenized)

    async def _tokenized(self, fields: TokenizeFields, client: Client) -> Tokenized:
        prompts = _prompts(fields)
        ids = [await self._model.prompts.encode(prompt, client) for prompt in prompts]
        names = None
        if fields.return_token_strs:
            names = [self._model.tokenizer.names(each) for each in ids]
        length = self._model.limits.context_length
        if isinstance(fields.prompt, list):
            return Tokenized(ids, [len(each) for each in ids], length, names)
        return Tokenized(ids[0], len(ids[0]), length, names and names[0])

    async def _detokenized(self, fields: DetokenizeFields, client: Client) -> Detokenized:
        check_context(fields.tokens, self._model.limits, "tokens")
        check_vocabulary(fields.tokens, self._model.limits, "tokens")
        text = await self._model.tokenizer.decode_any(fields.tokens)
        return Detokenized(text, text)


def _prompts(fields: TokenizeFields) -> Sequence[Prompt]:
    """Return the prompts. Raise ApiError unless either prompt or messages is set."""
    if (fields.prompt is None) == (fields.messages is None):
        raise ApiError(400, "prompt or messages is needed, and not both", param="prompt")
    if fields.messages is not None:
        if fields.add_special_tokens:
            raise ApiError(
                400,
                "add_special_tokens: a chat template adds them itself",
                param="add_special_tokens",
            )
        tools = [shown(tool.function) for tool in fields.tools or ()]
        return [conversation(fields, fields.messages, tools)]
    texts = [fields.prompt] if isinstance(fields.prompt, str) else fields.prompt or []
    return [TextPrompt(text, fields.add_special_tokens is not False) for text in texts]
