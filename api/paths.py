"""All paths of the router's HTTP port, and endpoints for model information and health probes."""

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
from api.dialect.bodies import BodyReader
from api.dialect.generation_endpoint import ApiDialect, Begin, GenerationEndpoint, PromptEndpoint
from api.dialect.ignored_fields import IgnoredFields, only
from api.dialect.models import AllModelNames, EndpointByModel, ListedModel, ModelNames
from api.dialect.problems import ANTHROPIC, OPENAI, ApiError
from api.http.messages import Handler, HttpRequest, HttpRoutes, whole
from api.native.generate import NativeEndpoint, TokenizeEndpoint
from api.openai.chat import ChatEndpoint
from api.openai.completions import CompletionsEndpoint
from api.openai.responses import ResponsesEndpoint
from api.pooling.endpoint import EmbeddingFields, F, PoolingAnswer, PoolingEndpoint, embeddings
from api.pooling.scores import RerankFields, ScoreFields, rerank, score
from api.pooling.vectors import PoolingService
from api.requests.idempotency import IdempotencyCache
from api.requests.served_model import ServedModel
from common import VERSION
from router.metrics import RouterMetrics

_NEVER = only()
# Known fields that are unsupported, with their harmless values.
_ALL: Mapping[str, IgnoredFields] = {
    "lora_path": _NEVER,
    "max_tokens_per_doc": _NEVER,
    "mm_processor_kwargs": only({}),
    "priority": only(0),
    "truncate_prompt_tokens": _NEVER,
}

OF_EMBEDDINGS: Mapping[str, IgnoredFields] = {
    **_ALL,
    "chat_template": _NEVER,
    "embed_dtype": only("float32"),
    "endianness": only("native", "little"),
    "messages": _NEVER,
    "normalize": only(True),
    "use_activation": only(True),
}
OF_SCORE: Mapping[str, IgnoredFields] = {
    **_ALL,
    "activation": only(True),
    "use_activation": only(True),
}
OF_RERANK: Mapping[str, IgnoredFields] = {
    **_ALL,
    "activation": only(True),
    "rank_fields": _NEVER,
    "use_activation": only(True),
}


def pooling_routes(
    vectors: PoolingService,
    metrics: RouterMetrics,
    begin: Begin,
    *,
    names: ModelNames,
    ignore_unknown: bool,
) -> Mapping[str, Mapping[str, Handler]]:
    """Return handlers by path and method. For arguments see PoolingEndpoint and BodyReader."""

    def endpoint(
        fields: type[F],
        unsupported: Mapping[str, IgnoredFields],
        answer: PoolingAnswer[F],
        id_prefix: str,
    ) -> Handler:
        reader = BodyReader(fields, unsupported, ignore_unknown=ignore_unknown)
        return PoolingEndpoint(
            reader, answer, vectors, metrics, begin, id_prefix=id_prefix, names=names
        )

    embeds = endpoint(EmbeddingFields, OF_EMBEDDINGS, embeddings, "embd-")
    scores = endpoint(ScoreFields, OF_SCORE, score, "score-")
    reranks = endpoint(RerankFields, OF_RERANK, rerank, "rerank-")
    return {
        "/v1/embeddings": {"POST": embeds},
        "/v1/score": {"POST": scores},
        "/score": {"POST": scores},
        "/v1/rerank": {"POST": reranks},
        "/rerank": {"POST": reranks},
    }


MODELS_PATH, MESSAGES_PATH = "/v1/models", "/v1/messages"


class AdminOperations:
    """HTTP handlers for model information and health probes."""

    def __init__(
        self,
        names: AllModelNames,
        context_lengths: Mapping[str, int],
        why_not_ready: Callable[[], Mapping[str, str | None]],
    ) -> None:
        """
        Args:
            names: model names that clients may use.
            context_lengths: context length of each served model in tokens, by name.
            why_not_ready: returns for each model a sentence, or None if a request could be placed
                now.
        """
        self._names = names
        self._context_lengths = context_lengths
        self._created = int(time.time())
        self._version = {"version": VERSION}
        self._why_not_ready = why_not_ready
        self._openapi = openapi.encoded(VERSION)

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
            "max_model_len": self._context_lengths[listed.served],
            "permission": [],
        }

    async def version(self, request: HttpRequest) -> web.Response:
        return whole(200, msgspec.json.encode(self._version))

    async def model_info(self, request: HttpRequest) -> web.Response:
        """Return model information in SGLang's format."""
        return self._info(request, lambda served: {})

    async def server_info(self, request: HttpRequest) -> web.Response:
        """Return server information in SGLang's format."""

        def more(served: str) -> Mapping[str, Any]:
            length = self._context_lengths[served]
            lengths = {"context_length": length, "max_model_len": length}
            return {
                **self._version,
                "served_model_name": served,
                **lengths,
                "internal_states": [{}],
            }

        return self._info(request, more)

    def _info(self, request: HttpRequest, more: Callable[[str], Mapping[str, Any]]) -> web.Response:
        try:
            served = self._names.served_by(request.query.get("model"))
        except ApiError as refusal:
            return refusal.response()
        info = {"model_path": served, "tokenizer_path": served, "is_generation": True}
        return whole(200, msgspec.json.encode({**info, **more(served)}))

    async def health(self, request: HttpRequest) -> web.Response:
        """Return 200, for liveness probes."""
        return whole(200, b'{"status":"alive"}')

    async def ready(self, request: HttpRequest) -> web.Response:
        """Return 200 if any model is ready. With several models, each is listed."""
        reasons = self._why_not_ready()
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


@dataclass(frozen=True, slots=True)
class EndpointParts:
    """Parts of one served model that its endpoints share.

    Attributes:
        names: names of the model and its adapters.
        begin: see GenerationEndpoint.
        budget_s: total time limit of a request, in seconds.
        ignore_unknown: unknown fields of requests are ignored.
    """

    model: ServedModel
    names: ModelNames
    metrics: RouterMetrics
    begin: Begin
    budget_s: float
    ignore_unknown: bool
    answers: IdempotencyCache
    vectors: PoolingService


def routes(
    models: Sequence[EndpointParts],
    metrics: RouterMetrics,
    why_not_ready: Callable[[], Mapping[str, str | None]],
    *,
    others: MethodsByPath,
    others_below: MethodsByPath,
) -> HttpRoutes:
    """Return the routes of the HTTP port.

    Args:
        metrics: counts requests without a known model.
        why_not_ready: see AdminOperations.
        others: handlers that are not part of a client API, by path and method.
        others_below: the same for all paths that begin with a key.
    """
    names = AllModelNames([each.names for each in models])
    context_lengths = {each.names.served: each.model.limits.context_length for each in models}
    operations = AdminOperations(names, context_lengths, why_not_ready)
    return HttpRoutes(
        {**_of_models(models, names, metrics), **_operations(operations), **others},
        {f"{MODELS_PATH}/": {"GET": operations.model}, **others_below},
        problems.error_body,
    )


def _of_models(
    models: Sequence[EndpointParts], names: AllModelNames, metrics: RouterMetrics
) -> MethodsByPath:
    """Return the routes of requests to a model. With several models, each has its own endpoints."""
    of_each = {each.names.served: _of_model(each) for each in models}
    if len(models) == 1:
        return next(iter(of_each.values()))

    def by_model(path: str, method: str) -> Handler:
        endpoints = {served: each[path][method] for served, each in of_each.items()}
        words = ANTHROPIC if path.startswith(MESSAGES_PATH) else OPENAI
        return EndpointByModel(names, endpoints, metrics, words)

    paths = next(iter(of_each.values()))
    return {path: {method: by_model(path, method) for method in paths[path]} for path in paths}


def _of_model(parts: EndpointParts) -> MethodsByPath:
    return {
        **_generation(parts),
        **_prompts(parts),
        **pooling_routes(
            parts.vectors,
            parts.metrics,
            parts.begin,
            names=parts.names,
            ignore_unknown=parts.ignore_unknown,
        ),
    }


def _generation(parts: EndpointParts) -> MethodsByPath:
    ignore_unknown = parts.ignore_unknown
    model = parts.model.speech, parts.model.shown
    dialects: Mapping[str, ApiDialect] = {
        "/v1/completions": CompletionsEndpoint(ignore_unknown=ignore_unknown),
        "/v1/chat/completions": ChatEndpoint(*model, ignore_unknown=ignore_unknown),
        "/v1/responses": ResponsesEndpoint(*model, ignore_unknown=ignore_unknown),
        MESSAGES_PATH: MessagesEndpoint(*model, ignore_unknown=ignore_unknown),
        "/generate": NativeEndpoint(ignore_unknown=ignore_unknown),
    }
    return {
        path: {
            "POST": GenerationEndpoint(
                dialect, parts.answers, parts.metrics, parts.begin, names=parts.names
            )
        }
        for path, dialect in dialects.items()
    }


def _prompts(parts: EndpointParts) -> MethodsByPath:
    prompts = PromptEndpoint(parts.begin, parts.names, parts.budget_s)
    tokens = TokenizeEndpoint(parts.model, prompts, ignore_unknown=parts.ignore_unknown)
    count_tokens = CountTokens(parts.model, prompts, ignore_unknown=parts.ignore_unknown)
    return {
        f"{MESSAGES_PATH}/count_tokens": {"POST": count_tokens},
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
