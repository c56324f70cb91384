"""All paths of the router's HTTP port."""

from collections.abc import Callable, Mapping

from api.anthropic.count_tokens import CountTokens
from api.anthropic.messages import AnthropicMessages
from api.dialect import problems
from api.dialect.endpoint_call import Dialect
from api.dialect.generation_endpoint import Begin, GenerationEndpoint
from api.dialect.model_names import ModelNames
from api.dialect.prompt_endpoint import PromptEndpoint
from api.http.request import Handler
from api.http.routes import Routes
from api.native.generate import Native
from api.native.tokens import Tokens
from api.openai.chat import Chat
from api.openai.completions import Completions
from api.openai.responses import Responses
from api.operations import MODELS_PATH, Operations
from api.pooling.assembly import pooling_routes
from api.pooling.vectors import Vectors
from api.requests.idempotency import KeptAnswers
from api.requests.served_model import ServedModel
from router.metrics import RouterMetrics


def routes(
    answers: KeptAnswers,
    vectors: Vectors,
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
) -> Routes:
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
    operations = Operations(names, model.limits.context_length, why_not_ready)
    prompts = PromptEndpoint(begin, budget_s)
    tokens = Tokens(model, prompts, names=names, ignore_unknown=ignore_unknown)
    count_tokens = CountTokens(model, prompts, names=names, ignore_unknown=ignore_unknown)
    chat = Chat(model.speech, model.shown, ignore_unknown=ignore_unknown)
    messages = AnthropicMessages(model.speech, model.shown, ignore_unknown=ignore_unknown)
    responses = Responses(model.speech, model.shown, ignore_unknown=ignore_unknown)

    def generation(dialect: Dialect) -> GenerationEndpoint:
        return GenerationEndpoint(dialect, answers, metrics, begin, names=names)

    return Routes(
        {
            "/v1/completions": {"POST": generation(Completions(ignore_unknown=ignore_unknown))},
            "/v1/chat/completions": {"POST": generation(chat)},
            "/v1/responses": {"POST": generation(responses)},
            "/v1/messages": {"POST": generation(messages)},
            "/v1/messages/count_tokens": {"POST": count_tokens},
            "/generate": {"POST": generation(Native(ignore_unknown=ignore_unknown))},
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
