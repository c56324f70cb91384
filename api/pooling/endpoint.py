"""HTTP endpoints for embeddings and scores, and /v1/embeddings."""

import asyncio
import base64
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Generic, Literal, TypeAlias, TypeVar

import msgspec
from aiohttp import web

from api.dialect import problems
from api.dialect.bodies import BodyReader, Ignored, name_ignored, take_json
from api.dialect.fields import ModelName, TextOrTokens, prompts_of
from api.dialect.generation_endpoint import Begin, RequestOrigin, id_headers
from api.dialect.models import ModelNames
from api.dialect.problems import ApiError, invalid
from api.generation import new_request_id
from api.http.messages import HttpRequest, whole
from api.pooling.vectors import PoolingService
from api.requests.generate_params import (
    MAX_PROMPTS,
    PooledPrompt,
    PoolingCaller,
    PoolingResult,
    floats,
)
from common.errors import ServingError
from router.metrics import RouterMetrics

F = TypeVar("F", bound="PoolingFields")

Texts = Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_PROMPTS)]


class PoolingFields(msgspec.Struct, kw_only=True):
    """Common request fields. Absent and null mean the same."""

    model: ModelName | None = None
    cache_salt: str | None = None


# Returns the response body. Raises ApiError or ServingError.
PoolingAnswer: TypeAlias = Callable[
    [PoolingService, F, PoolingCaller, RequestOrigin], Awaitable[bytes]
]


class PoolingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class PoolingEndpoint(Generic[F]):
    """HTTP handler of an endpoint for embeddings or scores. For one event loop.

    Args:
        answer: called with the service. Returns the response body.
        begin, names: see GenerationEndpoint.
    """

    def __init__(
        self,
        reader: BodyReader[F],
        answer: PoolingAnswer[F],
        service: PoolingService,
        metrics: RouterMetrics,
        begin: Begin,
        *,
        id_prefix: str,
        names: ModelNames,
    ) -> None:
        self._reader = reader
        self._answer = answer
        self._service = service
        self._metrics = metrics
        self._begin = begin
        self._id_prefix = id_prefix
        self._names = names

    async def __call__(self, request: HttpRequest) -> web.Response:
        """Serve a request. Cancelling this call cancels the request on its nodes."""
        request_id = new_request_id()
        label = request.header("x-request-id")
        headers = id_headers(label, request_id)
        try:
            ignored: list[str] = []
            fields = self._reader.read(take_json(request), ignored)
            name_ignored(request, ignored)
            self._names.check_served(fields.model)
            client = self._begin(request, 1)
            headers += client.usage.headers()
            caller = PoolingCaller(
                client,
                label=label,
                request_id=request_id,
                traceparent=request.header("traceparent"),
                cache_salt=fields.cache_salt,
            )
            origin = RequestOrigin.now(self._id_prefix + request_id, self._names.served)
            body = await self._answer(self._service, fields, caller, origin)
            return whole(200, body, headers=headers)
        except ApiError as refusal:
            self._metrics.rejected("invalid")
            return refusal.response(headers)
        except ServingError as error:
            return problems.of_error(error, self._reader.names).response(headers)


_AT_ONCE = 16  # vectors encoded before other tasks of the event loop run


class EmbeddingFields(PoolingFields, kw_only=True):
    input: TextOrTokens
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] | None = None
    add_special_tokens: bool | None = None
    user: Ignored = None


class Embedding(msgspec.Struct):
    object: str
    index: int
    embedding: Sequence[float] | str  # base64 of little-endian float32, or numbers


class EmbeddingList(msgspec.Struct):
    object: str
    data: Sequence[Embedding]
    model: str
    usage: PoolingUsage


async def embeddings(
    service: PoolingService, fields: EmbeddingFields, caller: PoolingCaller, origin: RequestOrigin
) -> bytes:
    """Return the response of /v1/embeddings."""
    pooled = await service.embed(_prompts(fields), caller, fields.dimensions or 0)
    return await _written(pooled, origin, as_text=fields.encoding_format == "base64")


def _prompts(fields: EmbeddingFields) -> Sequence[PooledPrompt]:
    given = fields.input
    if isinstance(given, list) and len(given) > MAX_PROMPTS and type(given[0]) is not int:
        raise invalid("input", f"has {len(given)} texts, {MAX_PROMPTS} allowed")
    return prompts_of("input", given, special=fields.add_special_tokens is not False)


async def _written(pooled: PoolingResult, origin: RequestOrigin, *, as_text: bool) -> bytes:
    """Return the response body. Yields to other tasks: there may be millions of numbers."""
    parts = []
    for index, vector in enumerate(pooled.vectors):
        encoded: Sequence[float] | str
        encoded = base64.b64encode(vector).decode() if as_text else floats(vector).tolist()
        parts.append(msgspec.json.encode(Embedding("embedding", index, encoded)))
        if index % _AT_ONCE == _AT_ONCE - 1:
            await asyncio.sleep(0)
    num_tokens = sum(pooled.num_tokens)
    head = EmbeddingList("list", [], origin.model, PoolingUsage(num_tokens, num_tokens))
    # The record is encoded with empty data, and then the data is inserted in its place.
    before, _, after = msgspec.json.encode(head).partition(b"[]")
    return b"".join((before, b"[", b",".join(parts), b"]", after))
