"""HTTP requests with a prompt, from the body to the end of the response."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from msgspec.structs import replace

from api.auth.client import Client
from api.dialect import problems
from api.dialect.bodies import BodyReader, name_ignored, take_json
from api.dialect.events import ApiDialect, EndpointCall, EndpointReply, RequestOrigin
from api.dialect.models import ModelNames
from api.dialect.problems import OPENAI, ApiError, Words
from api.http.messages import HttpRequest, whole
from api.requests.generate_params import GenerateParams
from api.requests.idempotency import IdempotencyCache, IdempotentRetry
from api.requests.limiter import DeadlineScope, new_request_id
from common.errors import ServingError
from common.logs import Throttle, ThrottledLog
from router.metrics import RouterMetrics

log = logging.getLogger(__name__)

# Returns the client of that many generation requests. Raises ServingError if it may not send them.
Begin = Callable[[HttpRequest, int], Client]


class GenerationEndpoint:
    """HTTP handler of a generation endpoint. For one event loop."""

    def __init__(
        self,
        dialect: ApiDialect,
        answers: IdempotencyCache,
        metrics: RouterMetrics,
        begin: Begin,
        *,
        names: ModelNames,
    ) -> None:
        """
        Args:
            begin: called after a request is parsed, before any work on it.
            names: model names that clients may use.
        """
        self._dialect = dialect
        self._answers = answers
        self._metrics = metrics
        self._begin = begin
        self._names = names
        self._refusals = ThrottledLog(log, Throttle())

    async def __call__(self, request: HttpRequest) -> web.StreamResponse:
        """Serve a request. Cancelling this call cancels every choice on its nodes."""
        request_id = new_request_id()
        label = request.header("x-request-id")
        headers = id_headers(label, request_id)
        try:
            body = take_json(request)
            asked = self._dialect.read(body)
            name_ignored(request, asked.ignored)
            adapter = self._names.adapter(asked.model, asked.lora_path)
            client = self._begin(request, len(asked.requests))
            retry = self._retry(client, request, body, request_id)
            del body  # releases the memory: it is not needed until the response ends
        except ApiError as refusal:
            self._metrics.rejected("invalid")
            self._refusals.info(
                "request rejected", request_id=request_id, label=label, reason=refusal
            )
            return refusal.in_words(self._dialect.words).response(headers)
        except ServingError as error:
            return self._problem(error).response(headers)
        if retry is not None:
            request_id = retry.request_id
            headers = id_headers(label, request_id)
        headers += tuple(client.usage.headers())
        origin = RequestOrigin.now(
            self._dialect.id_prefix + request_id, adapter or self._names.served
        )
        reply = asked.reply(origin, request, headers)
        traceparent = request.header("traceparent")
        session_id = _session_id(request, asked)
        choices = [
            replace(choice, request_id=own, label=label, session_id=session_id, adapter=adapter)
            for choice, own in zip(asked.requests, _ids(request_id, asked), strict=True)
        ]
        try:
            await self._generate(choices, client, reply, traceparent, retry)
        except ServingError as error:
            return reply.failed(self._problem(error, asked.form))
        return reply.response()

    def _retry(
        self, client: Client, request: HttpRequest, body: bytes, request_id: str
    ) -> IdempotentRetry | None:
        key = request.header("idempotency-key")
        return self._answers.retry(client, key, lambda: request.route.encode() + body, request_id)

    def _problem(self, error: ServingError, form: str = "") -> ApiError:
        refusal = problems.of_error(error, self._dialect.field_names, form)
        return refusal.in_words(self._dialect.words)

    async def _generate(
        self,
        choices: Sequence[GenerateParams],
        client: Client,
        reply: EndpointReply,
        traceparent: str,
        retry: IdempotentRetry | None,
    ) -> None:
        """Run all choices concurrently. The first failure ends the others."""

        def generated(index: int) -> Coroutine[Any, Any, None]:
            write, offer = partial(reply.write, index), partial(reply.offer, index)
            return self._answers.generate(
                choices[index], client, write, traceparent, offer, retry=retry, index=index
            )

        if len(choices) == 1:
            await generated(0)
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                for index in range(len(choices)):
                    tasks.create_task(generated(index))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None


def id_headers(label: str, request_id: str) -> tuple[tuple[str, str], ...]:
    """Return the id headers: proxies expect their own x-request-id back, and may send it again."""
    return ("x-request-id", label or request_id), ("baton-request-id", request_id)


def _ids(request_id: str, asked: EndpointCall) -> list[str]:
    """Return the request ids of the choices, in order."""
    if len(asked.requests) == 1:
        return [request_id]
    return [f"{request_id}-{index}" for index in range(len(asked.requests))]


def _session_id(request: HttpRequest, asked: EndpointCall) -> str:
    """Return the session id. Headers take precedence, because proxies can set them."""
    named = request.header("x-session-id") or request.header("x-smg-routing-key")
    return named or asked.session_id


F = TypeVar("F", bound=msgspec.Struct)


class PromptEndpoint:
    """The shared part of such handlers."""

    def __init__(self, begin: Begin, names: ModelNames, budget_s: float) -> None:
        """
        Args:
            begin, names: see GenerationEndpoint.
            budget_s: time limit of a request, in seconds.
        """
        self._begin = begin
        self._names = names
        self._budget_s = budget_s

    async def answered(
        self,
        request: HttpRequest,
        reader: BodyReader[F],
        answer: Callable[[F, Client], Awaitable[msgspec.Struct]],
        words: Words = OPENAI,
    ) -> web.Response:
        """Run a handler within the limits and return its response.

        Args:
            reader: of the body, whose record has a `model`.
            answer: called with the fields and the client. Raises ApiError or ServingError.
            words: error vocabulary.
        """
        try:
            client = self._begin(request, 1)
            with DeadlineScope(self._budget_s):
                ignored: list[str] = []
                fields: Any = reader.read(take_json(request), ignored)
                name_ignored(request, ignored)
                self._names.adapter(fields.model)
                return whole(200, msgspec.json.encode(await answer(fields, client)))
        except ApiError as refusal:
            return refusal.in_words(words).response()
        except ServingError as error:
            return problems.of_error(error, reader.names).in_words(words).response()
