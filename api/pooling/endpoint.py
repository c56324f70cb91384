"""One HTTP request for embeddings or scores, from its body to its response."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Generic, TypeAlias, TypeVar

import msgspec
from aiohttp import web

from api.dialect import problems
from api.dialect.bodies import BodyReader, name_ignored, take_json
from api.dialect.fields import ModelName
from api.dialect.generation_endpoint import Begin
from api.dialect.ignored_fields import IgnoredFields
from api.dialect.model_names import ModelNames
from api.dialect.origin import RequestOrigin
from api.dialect.problems import ApiError
from api.http.answers import whole
from api.http.request import HttpRequest
from api.pooling.vectors import PoolingCaller
from api.requests.limiter import new_request_id
from api.requests.pooled import MAX_PROMPTS
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
