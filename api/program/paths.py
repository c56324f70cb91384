"""All paths of the router's HTTP port, and endpoints for model information and health probes."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias
from urllib.parse import unquote

import msgspec
from aiohttp import web

from api import openapi
from api.anthropic.fields import CountTokensFields
from api.anthropic.messages import MESSAGES, count_tokens
from api.dialect import problems
from api.dialect.bodies import BodyReader
from api.dialect.generation_endpoint import (
    Begin,
    Dialect,
    DialectReader,
    GenerationEndpoint,
    PromptAnswer,
    PromptEndpoint,
)
from api.dialect.ignored_fields import (
    OF_COUNTED,
    OF_DETOKENIZE,
    OF_EMBEDDINGS,
    OF_RERANK,
    OF_SCORE,
    OF_TOKENIZE,
    IgnoredFields,
)
from api.dialect.models import AllModelNames, EndpointByModel, ListedModel
from api.dialect.problems import ANTHROPIC, OPENAI, ApiError, Words
from api.http.messages import Handler, HttpRequest, HttpRoutes, whole
from api.native.generate import (
    NATIVE,
    DetokenizeFields,
    TokenizeFields,
    detokenize,
    tokenize,
)
from api.openai.chat import CHAT
from api.openai.completions import COMPLETIONS
from api.openai.responses import RESPONSES
from api.pooling.endpoint import EmbeddingFields, PoolingAnswer, PoolingEndpoint, embeddings
from api.pooling.scores import RerankFields, ScoreFields, rerank, score
from api.program.nodes import ModelPool, Pools
from common import VERSION
from router.metrics import RouterMetrics

MODELS_PATH, MESSAGES_PATH = "/v1/models", "/v1/messages"
DIALECTS: Mapping[str, Dialect[Any]] = {
    "/v1/completions": COMPLETIONS,
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    MESSAGES_PATH: MESSAGES,
    "/generate": NATIVE,
}


class AdminOperations:
    """HTTP handlers for model information and health probes."""

    def __init__(self, names: AllModelNames, pools: Pools) -> None:
        self._names = names
        self._pools = pools
        self._created = int(time.time())
        self._version = {"version": VERSION}
        self._openapi = openapi.encoded(VERSION)

    def _context_length(self, served: str) -> int:
        return self._pools[served].model.limits.context_length

    async def models(self, request: HttpRequest) -> web.Response:
        content = {"object": "list", "data": list(map(self._entry, self._names.listed()))}
        return whole(200, msgspec.json.encode(content))

    async def model(self, request: HttpRequest) -> web.Response:
        name = unquote(request.route.removeprefix(f"{MODELS_PATH}/"))
        try:
            served = self._names.served_by(name)
        except ApiError as refusal:
            return refusal.response()
        found = ListedModel(name, served, "" if name == served else name)
        return whole(200, msgspec.json.encode(self._entry(found)))

    def _entry(self, listed: ListedModel) -> Mapping[str, Any]:
        return {
            "id": listed.name,
            "object": "model",
            "created": self._created,
            "owned_by": "baton",
            # Fields of vLLM's server that its clients need.
            "root": listed.name,
            "parent": listed.served if listed.adapter else None,
            "max_model_len": self._context_length(listed.served),
            "permission": [],
        }

    async def version(self, request: HttpRequest) -> web.Response:
        return whole(200, msgspec.json.encode(self._version))

    async def model_info(self, request: HttpRequest) -> web.Response:
        """Return model information in SGLang's format."""
        return self._info(request, server=False)

    async def server_info(self, request: HttpRequest) -> web.Response:
        """Return server information in SGLang's format."""
        return self._info(request, server=True)

    def _info(self, request: HttpRequest, *, server: bool) -> web.Response:
        try:
            served = self._names.served_by(request.query.get("model"))
        except ApiError as refusal:
            return refusal.response()
        info = {
            "model_path": served,
            "tokenizer_path": served,
            "is_generation": self._pools[served].generates,
        }
        if server:
            length = self._context_length(served)
            info |= {
                **self._version,
                "served_model_name": served,
                "context_length": length,
                "max_model_len": length,
                "internal_states": [{}],
            }
        return whole(200, msgspec.json.encode(info))

    async def health(self, request: HttpRequest) -> web.Response:
        """Return 200, for liveness probes."""
        return whole(200, b'{"status":"alive"}')

    async def ready(self, request: HttpRequest) -> web.Response:
        """Return 200 if any model is ready. With several models, each is listed."""
        reasons = {name: pool.why_not_ready() for name, pool in self._pools.items()}
        ready = None in reasons.values()
        content: dict[str, Any] = {"status": "ready" if ready else "not ready"}
        if not ready:
            content["reason"] = next(filter(None, reasons.values()))
        if len(reasons) > 1:
            content["models"] = {name: why or "ready" for name, why in reasons.items()}
        return whole(200 if ready else 503, msgspec.json.encode(content))

    async def openapi(self, request: HttpRequest) -> web.Response:
        return whole(200, self._openapi)


MethodsByPath: TypeAlias = Mapping[str, Mapping[str, Handler]]


def routes(
    models: Sequence[ModelPool],
    metrics: RouterMetrics,
    begin: Begin,
    *,
    others: MethodsByPath,
    others_below: MethodsByPath,
) -> HttpRoutes:
    """Return the routes of the HTTP port.

    Args:
        metrics: counts requests without a known model.
        others: handlers that are not part of a client API, by path and method.
        others_below: the same for all paths that begin with a key.
    """
    names = AllModelNames([each.names for each in models])
    operations = AdminOperations(names, {each.name: each for each in models})
    return HttpRoutes(
        {**_of_models(models, names, metrics, begin), **_operations(operations), **others},
        {f"{MODELS_PATH}/": {"GET": operations.model}, **others_below},
        problems.error_body,
    )


def _of_models(
    models: Sequence[ModelPool], names: AllModelNames, metrics: RouterMetrics, begin: Begin
) -> MethodsByPath:
    """Return the routes of requests to a model. With several models, each has its own endpoints."""
    of_each = {each.name: _of_model(each, begin) for each in models}
    paths = next(iter(of_each.values()))
    if len(models) == 1:
        return paths

    def by_model(path: str, method: str) -> Handler:
        endpoints = {served: each[path][method] for served, each in of_each.items()}
        words = ANTHROPIC if path.startswith(MESSAGES_PATH) else OPENAI
        return EndpointByModel(names, endpoints, metrics, words)

    return {path: {method: by_model(path, method) for method in paths[path]} for path in paths}


_PROMPTS: Mapping[str, tuple[Any, Mapping[str, IgnoredFields], PromptAnswer[Any], Words]] = {
    f"{MESSAGES_PATH}/count_tokens": (CountTokensFields, OF_COUNTED, count_tokens, ANTHROPIC),
    "/tokenize": (TokenizeFields, OF_TOKENIZE, tokenize, OPENAI),
    "/detokenize": (DetokenizeFields, OF_DETOKENIZE, detokenize, OPENAI),
}
# Record of the body, its further known fields, the response, and the prefix of ids.
_POOLING: Mapping[str, tuple[Any, Mapping[str, IgnoredFields], PoolingAnswer[Any], str]] = {
    "/v1/embeddings": (EmbeddingFields, OF_EMBEDDINGS, embeddings, "embd-"),
    **dict.fromkeys(("/v1/score", "/score"), (ScoreFields, OF_SCORE, score, "score-")),
    **dict.fromkeys(("/v1/rerank", "/rerank"), (RerankFields, OF_RERANK, rerank, "rerank-")),
}


def _of_model(pool: ModelPool, begin: Begin) -> MethodsByPath:
    names, budget_s = pool.names, pool.config.request_timeout_s
    ignores = {"ignore_unknown": pool.config.ignore_unknown_fields}
    handlers: dict[str, Handler] = {}
    for path, dialect in DIALECTS.items():
        reader = DialectReader(dialect, pool.model.model_format, **ignores)
        handlers[path] = GenerationEndpoint(
            reader, pool.idempotency, pool.metrics, begin, names=names
        )
    for path, (fields, others, answer, words) in _PROMPTS.items():
        handlers[path] = PromptEndpoint(
            BodyReader(fields, others, **ignores), answer, pool.model, begin, names, budget_s, words
        )
    for path, (fields, others, pooled, prefix) in _POOLING.items():
        handlers[path] = PoolingEndpoint(
            *(BodyReader(fields, others, **ignores), pooled, pool.pooling_service, pool.metrics),
            begin,
            id_prefix=prefix,
            names=names,
        )
    return {path: {"POST": handler} for path, handler in handlers.items()}


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
