"""One HTTP request for embeddings or scores, from its body to its response, and /v1/embeddings."""

import asyncio
import base64
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Generic, Literal, TypeAlias, TypeVar, cast

import msgspec
from aiohttp import web

from api.dialect import problems
from api.dialect.bodies import BodyReader, Ignored, name_ignored, take_json
from api.dialect.events import RequestOrigin
from api.dialect.fields import ModelName, TokenId
from api.dialect.generation_endpoint import Begin, ModelNames
from api.dialect.ignored_fields import IgnoredFields
from api.dialect.problems import ApiError
from api.http.messages import HttpRequest, whole
from api.pooling.vectors import PoolingCaller, PoolingService
from api.requests.generate_params import (
    MAX_PROMPTS,
    PooledPrompt,
    PoolingResult,
    TextPrompt,
    TokenIdsPrompt,
    floats,
)
from api.requests.limiter import new_request_id
from common.errors import ServingError
from router.metrics import RouterMetrics

F = TypeVar("F", bound="PoolingFields")

Texts = Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_PROMPTS)]


class PoolingFields(msgspec.Struct, kw_only=True):
    """Common request fields. Absent and null mean the same."""

    model: ModelName | None = None
    cache_salt: str | None = None


# Returns the response body. Raises ApiError or ServingError.
PoolingAnswer: TypeAlias = Callable[[F, PoolingCaller, RequestOrigin], Awaitable[bytes]]


class PoolingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class PoolingEndpoint(Generic[F]):
    """HTTP handler of an endpoint for embeddings or scores. For one event loop."""

    def __init__(
        self,
        fields: type[F],
        unsupported: Mapping[str, IgnoredFields],
        answer: PoolingAnswer[F],
        metrics: RouterMetrics,
        begin: Begin,
        *,
        id_prefix: str,
        names: ModelNames,
        ignore_unknown: bool,
    ) -> None:
        """
        Args:
            fields, unsupported, ignore_unknown: see BodyReader.
            answer: returns the response body. Raises ApiError or ServingError.
            begin, names: see GenerationEndpoint.
        """
        self._reader = BodyReader(fields, unsupported, ignore_unknown=ignore_unknown)
        self._answer = answer
        self._metrics = metrics
        self._begin = begin
        self._id_prefix = id_prefix
        self._names = names

    async def __call__(self, request: HttpRequest) -> web.Response:
        """Serve a request. Cancelling this call cancels the request on its nodes."""
        request_id = new_request_id()
        label = request.header("x-request-id")
        headers: tuple[tuple[str, str], ...] = (
            ("x-request-id", label or request_id),
            ("baton-request-id", request_id),
        )
        try:
            ignored: list[str] = []
            fields = self._reader.read(take_json(request), ignored)
            name_ignored(request, ignored)
            self._names.check_served(fields.model)
            client = self._begin(request, 1)
            headers += tuple(client.usage.headers())
            asker = PoolingCaller(
                client,
                label=label,
                request_id=request_id,
                traceparent=request.header("traceparent"),
                cache_salt=fields.cache_salt,
            )
            origin = RequestOrigin.now(self._id_prefix + request_id, self._names.served)
            return whole(200, await self._answer(fields, asker, origin), headers=headers)
        except ApiError as refusal:
            self._metrics.rejected("invalid")
            return refusal.response(headers)
        except ServingError as error:
            return problems.of_error(error, self._reader.names).response(headers)


_AT_ONCE = 16  # vectors encoded before other tasks get a turn

_Ids = list[TokenId]


class EmbeddingFields(PoolingFields, kw_only=True):
    input: str | list[str | TokenId | _Ids]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] | None = None
    add_special_tokens: bool | None = None
    user: Ignored = None


class Embedding(msgspec.Struct):
    object: str
    index: int
    embedding: Sequence[float] | str  # base64: of little-endian float32


class EmbeddingList(msgspec.Struct):
    object: str
    data: Sequence[Embedding]
    model: str
    usage: PoolingUsage


class EmbeddingsEndpoint:
    """The responses of /v1/embeddings."""

    def __init__(self, vectors: PoolingService) -> None:
        self._vectors = vectors

    async def answer(
        self, fields: EmbeddingFields, asker: PoolingCaller, origin: RequestOrigin
    ) -> bytes:
        prompts = _prompts(fields)
        pooled = await self._vectors.embed(prompts, asker, fields.dimensions or 0)
        as_text = fields.encoding_format == "base64"
        return await _written(pooled, origin, as_text=as_text)


def _prompts(fields: EmbeddingFields) -> Sequence[PooledPrompt]:
    special = fields.add_special_tokens is not False
    given = fields.input
    if isinstance(given, str):
        return [TextPrompt(given, special)]
    if len(given) > MAX_PROMPTS and type(given[0]) is not int:
        raise ApiError(400, f"input has {len(given)} texts, {MAX_PROMPTS} allowed", param="input")
    match {type(item) for item in given}:
        case kinds if not kinds:
            raise ApiError(400, "input is empty", param="input")
        case kinds if kinds == {int}:
            return [TokenIdsPrompt(cast(list[int], given))]
        case kinds if kinds == {str}:
            return [TextPrompt(text, special) for text in cast(list[str], given)]
        case kinds if kinds == {list}:
            return [TokenIdsPrompt(ids) for ids in cast(list[list[int]], given)]
        case _:
            raise ApiError(400, "input mixes text, token ids and lists of them", param="input")


async def _written(pooled: PoolingResult, origin: RequestOrigin, *, as_text: bool) -> bytes:
    """Return the response body.

    It may have millions of numbers, so other tasks get turns meanwhile.
    """
    parts = []
    for index, vector in enumerate(pooled.vectors):
        told: Sequence[float] | str
        told = base64.b64encode(vector).decode() if as_text else floats(vector).tolist()
        parts.append(msgspec.json.encode(Embedding("embedding", index, told)))
        if index % _AT_ONCE == _AT_ONCE - 1:
            await asyncio.sleep(0)
    num_tokens = sum(pooled.num_tokens)
    head = EmbeddingList("list", [], origin.model, PoolingUsage(num_tokens, num_tokens))
    # The record is encoded with empty data, and the data is inserted in its place.
    before, _, after = msgspec.json.encode(head).partition(b"[]")
    return b"".join((before, b"[", b",".join(parts), b"]", after))
