"""All paths of the router's HTTP port, with model information and health probes."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import unquote

import msgspec
from aiohttp import web

from api import openapi
from api.anthropic.messages import CountTokens, MessagesEndpoint
from api.dialect import problems
from api.dialect.events import ApiDialect
from api.dialect.generation_endpoint import Begin, GenerationEndpoint, ModelNames, PromptEndpoint
from api.dialect.problems import ApiError
from api.http.messages import Handler, HttpRequest, whole
from api.http.shared import ErrorBody
from api.native.generate import NativeEndpoint, TokenizeEndpoint
from api.openai.chat import ChatEndpoint
from api.openai.completions import CompletionsEndpoint
from api.openai.responses import ResponsesEndpoint
from api.pooling.assembly import pooling_routes
from api.pooling.vectors import PoolingService
from api.requests.idempotency import IdempotencyCache
from api.requests.served_model import ServedModel
from common import VERSION
from router.metrics import RouterMetrics

MODELS_PATH = "/v1/models"


class AdminOperations:
    """HTTP handlers of these endpoints."""

    def __init__(
        self,
        names: ModelNames,
        context_length: int,
        why_not_ready: Callable[[], str | None],
    ) -> None:
        """
        Args:
            names: model names that clients may use.
            why_not_ready: returns a sentence, or None if a request could be placed now.
        """
        self._names, model_name = names, names.served
        self._model: Mapping[str, Any] = {
            "id": model_name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "baton",
            # Fields of vLLM's server that its clients need.
            "root": model_name,
            "parent": None,
            "max_model_len": context_length,
            "permission": [],
        }
        self._version = {"version": VERSION}
        # Fields of SGLang's server.
        self._model_info = {
            "model_path": model_name,
            "tokenizer_path": model_name,
            "is_generation": True,
        }
        self._server_info = {
            **self._model_info,
            **self._version,
            "served_model_name": model_name,
            "context_length": context_length,
            "max_model_len": context_length,
            "internal_states": [{}],
        }
        self._why_not_ready = why_not_ready
        self._openapi = msgspec.json.encode(openapi.document(VERSION))

    async def models(self, request: HttpRequest) -> web.Response:
        adapters = [self._adapter(name) for name in self._names.adapters]
        content = {"object": "list", "data": [self._model, *adapters]}
        return whole(200, msgspec.json.encode(content))

    async def model(self, request: HttpRequest) -> web.Response:
        name = unquote(request.route.removeprefix(f"{MODELS_PATH}/"))
        try:
            adapter = self._names.adapter(name)
        except ApiError as refusal:
            return refusal.response()
        found = self._adapter(adapter) if adapter else self._model
        return whole(200, msgspec.json.encode(found))

    def _adapter(self, name: str) -> Mapping[str, Any]:
        return {**self._model, "id": name, "root": name, "parent": self._names.served}

    async def version(self, request: HttpRequest) -> web.Response:
        return whole(200, msgspec.json.encode(self._version))

    async def model_info(self, request: HttpRequest) -> web.Response:
        return whole(200, msgspec.json.encode(self._model_info))

    async def server_info(self, request: HttpRequest) -> web.Response:
        return whole(200, msgspec.json.encode(self._server_info))

    async def health(self, request: HttpRequest) -> web.Response:
        """Return 200, for liveness probes."""
        return whole(200, b'{"status":"alive"}')

    async def ready(self, request: HttpRequest) -> web.Response:
        reason = self._why_not_ready()
        if reason is None:
            return whole(200, b'{"status":"ready"}')
        return whole(503, msgspec.json.encode({"status": "not ready", "reason": reason}))

    async def openapi(self, request: HttpRequest) -> web.Response:
        return whole(200, self._openapi)


MethodsByPath: TypeAlias = Mapping[str, Mapping[str, Handler]]


@dataclass(frozen=True, slots=True)
class EndpointParts:
    """The parts that endpoints share.

    Attributes:
        names: model names that clients may use.
        begin: see GenerationEndpoint.
        budget_s: total time limit of a request, in seconds.
        ignore_unknown: whether to ignore unknown fields of requests.
    """

    model: ServedModel
    names: ModelNames
    metrics: RouterMetrics
    begin: Begin
    budget_s: float
    ignore_unknown: bool


class HttpRoutes:
    """The handler of each request. Without one, a handler that returns 404 or 405."""

    def __init__(
        self,
        exact: Mapping[str, Mapping[str, Handler]],
        below: Mapping[str, Mapping[str, Handler]],
        error_body: ErrorBody,
    ) -> None:
        """
        Args:
            exact: handlers by path and method. GET handlers also serve HEAD.
            below: the same for every path that begins with this one, which ends with "/".
        """
        self._exact = exact
        self._below = below
        self._error_body = error_body

    @property
    def paths(self) -> Sequence[str]:
        """Return every path or path prefix that is served."""
        return [*self._exact, *self._below]

    def __call__(self, request: HttpRequest) -> Handler:
        path = request.route
        methods = self._exact.get(path) or self._methods_below(path)
        if methods is None:
            return self._refusing(404, f"no such path: {path}")
        handler = methods.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            allowed = ", ".join(methods)
            sentence = f"{path} takes {allowed}, not {request.method}"
            return self._refusing(405, sentence, (("allow", allowed),))
        return handler

    def _methods_below(self, path: str) -> Mapping[str, Handler] | None:
        return next((m for start, m in self._below.items() if path.startswith(start)), None)

    def _refusing(
        self, status: int, sentence: str, headers: tuple[tuple[str, str], ...] = ()
    ) -> Handler:
        async def refuse(_: HttpRequest) -> web.Response:
            return whole(status, self._error_body(status, sentence), headers=headers)

        return refuse


def routes(
    parts: EndpointParts,
    answers: IdempotencyCache,
    vectors: PoolingService,
    why_not_ready: Callable[[], str | None],
    *,
    others: MethodsByPath,
    others_below: MethodsByPath,
) -> HttpRoutes:
    """Return the routes of the HTTP port.

    Args:
        why_not_ready: returns a sentence, or None if a request could be placed now.
        others: handlers beside OpenAI's API, by path and method.
        others_below: the same for every path that begins with this one.
    """
    operations = AdminOperations(parts.names, parts.model.limits.context_length, why_not_ready)
    names, ignore_unknown = parts.names, parts.ignore_unknown
    return HttpRoutes(
        {
            **_generation(parts, answers),
            **_prompts(parts),
            **pooling_routes(
                vectors, parts.metrics, parts.begin, names=names, ignore_unknown=ignore_unknown
            ),
            **_operations(operations),
            **others,
        },
        {f"{MODELS_PATH}/": {"GET": operations.model}, **others_below},
        problems.error_body,
    )


def _generation(parts: EndpointParts, answers: IdempotencyCache) -> MethodsByPath:
    ignore_unknown = parts.ignore_unknown
    model = parts.model.speech, parts.model.shown
    dialects: Mapping[str, ApiDialect] = {
        "/v1/completions": CompletionsEndpoint(ignore_unknown=ignore_unknown),
        "/v1/chat/completions": ChatEndpoint(*model, ignore_unknown=ignore_unknown),
        "/v1/responses": ResponsesEndpoint(*model, ignore_unknown=ignore_unknown),
        "/v1/messages": MessagesEndpoint(*model, ignore_unknown=ignore_unknown),
        "/generate": NativeEndpoint(ignore_unknown=ignore_unknown),
    }
    return {
        path: {
            "POST": GenerationEndpoint(
                dialect, answers, parts.metrics, parts.begin, names=parts.names
            )
        }
        for path, dialect in dialects.items()
    }


def _prompts(parts: EndpointParts) -> MethodsByPath:
    prompts = PromptEndpoint(parts.begin, parts.names, parts.budget_s)
    tokens = TokenizeEndpoint(parts.model, prompts, ignore_unknown=parts.ignore_unknown)
    count_tokens = CountTokens(parts.model, prompts, ignore_unknown=parts.ignore_unknown)
    return {
        "/v1/messages/count_tokens": {"POST": count_tokens},
        "/tokenize": {"POST": tokens.tokenize},
        "/detokenize": {"POST": tokens.detokenize},
    }


def _operations(operations: AdminOperations) -> MethodsByPath:
    handlers: Mapping[str, Handler] = {
        "/version": operations.version,
        "/get_model_info": operations.model_info,
        "/model_info": operations.model_info,
        "/get_server_info": operations.server_info,
        "/server_info": operations.server_info,
        MODELS_PATH: operations.models,
        f"{MODELS_PATH}/": operations.models,
        "/health": operations.health,
        "/ready": operations.ready,
        "/openapi.json": operations.openapi,
    }
    return {path: {"GET": handler} for path, handler in handlers.items()}
