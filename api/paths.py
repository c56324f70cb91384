"""All paths of the router's HTTP port."""

from collections.abc import Callable, Mapping

from api.anthropic.count_tokens import CountTokens
from api.anthropic.messages import MessagesEndpoint
from api.dialect import problems
from api.dialect.endpoint_call import ApiDialect
from api.dialect.generation_endpoint import Begin, GenerationEndpoint
from api.dialect.model_names import ModelNames
from api.dialect.prompt_endpoint import PromptEndpoint
from api.http.request import Handler
from api.http.routes import HttpRoutes
from api.native.generate import NativeEndpoint
from api.native.tokens import TokenizeEndpoint
from api.openai.chat import ChatEndpoint
from api.openai.completions import CompletionsEndpoint
from api.openai.responses import ResponsesEndpoint
from api.operations import MODELS_PATH, AdminOperations
from api.pooling.assembly import pooling_routes
from api.pooling.vectors import PoolingService
from api.requests.idempotency import IdempotencyCache
from api.requests.served_model import ServedModel
from router.metrics import RouterMetrics


def routes(
    answers: IdempotencyCache,
    vectors: PoolingService,
    metrics: RouterMetrics,
    begin: Begin,
    *,
    model: ServedModel,
    names: ModelNames,
    budget_s: float,
    ignore_unknown: bool,
    why_not_ready: Callable[[], str | None],
    others: Mapping[str, Mapping[str, Handler]],
    others_below: Mapping[str, Mapping[str, Handler]],
) -> HttpRoutes:
    """Return the routes of the HTTP port.

    Args:
        begin: see GenerationEndpoint.
        names: model names that clients may use.
        budget_s: total time limit of a request, in seconds.
        ignore_unknown: whether to ignore unknown fields of requests.
        why_not_ready: returns a sentence, or None if a request could be placed now.
        others: handlers beside OpenAI's API, by path and method.
        others_below: the same for every path that begins with this one.
    """
    operations = AdminOperations(names, model.limits.context_length, why_not_ready)
    prompts = PromptEndpoint(begin, budget_s)
    tokens = TokenizeEndpoint(model, prompts, names=names, ignore_unknown=ignore_unknown)
    count_tokens = CountTokens(model, prompts, names=names, ignore_unknown=ignore_unknown)
    chat = ChatEndpoint(model.speech, model.shown, ignore_unknown=ignore_unknown)
    messages = MessagesEndpoint(model.speech, model.shown, ignore_unknown=ignore_unknown)
    responses = ResponsesEndpoint(model.speech, model.shown, ignore_unknown=ignore_unknown)

    def generation(dialect: ApiDialect) -> GenerationEndpoint:
        return GenerationEndpoint(dialect, answers, metrics, begin, names=names)

    return HttpRoutes(
        {
            "/v1/completions": {
                "POST": generation(CompletionsEndpoint(ignore_unknown=ignore_unknown))
            },
            "/v1/chat/completions": {"POST": generation(chat)},
            "/v1/responses": {"POST": generation(responses)},
            "/v1/messages": {"POST": generation(messages)},
            "/v1/messages/count_tokens": {"POST": count_tokens},
            "/generate": {"POST": generation(NativeEndpoint(ignore_unknown=ignore_unknown))},
            "/tokenize": {"POST": tokens.tokenize},
            "/detokenize": {"POST": tokens.detokenize},
            **pooling_routes(vectors, metrics, begin, names=names, ignore_unknown=ignore_unknown),
            "/version": {"GET": operations.version},
            "/get_model_info": {"GET": operations.model_info},
            "/model_info": {"GET": operations.model_info},
            "/get_server_info": {"GET": operations.server_info},
            "/server_info": {"GET": operations.server_info},
            MODELS_PATH: {"GET": operations.models},
            f"{MODELS_PATH}/": {"GET": operations.models},
            "/health": {"GET": operations.health},
            "/ready": {"GET": operations.ready},
            "/openapi.json": {"GET": operations.openapi},
            **others,
        },
        {f"{MODELS_PATH}/": {"GET": operations.model}, **others_below},
        problems.error_body,
    )
