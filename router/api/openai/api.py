"""All paths of the router's HTTP port."""

from collections.abc import Callable, Mapping

from common.metrics import RouterMetrics
from router.api.http.request import Handler
from router.api.http.routes import Routes
from router.api.openai import problems
from router.api.openai.chat import Chat
from router.api.openai.completions import Completions
from router.api.openai.generation_endpoint import Begin, GenerationEndpoint
from router.api.openai.operations import MODELS_PATH, Operations
from router.generation import Generator


def routes(
    generator: Generator,
    metrics: RouterMetrics,
    begin: Begin,
    *,
    model_name: str,
    context_length: int,
    ignore_unknown: bool,
    why_not_ready: Callable[[], str | None],
    others: Mapping[str, Mapping[str, Handler]],
    others_below: Mapping[str, Mapping[str, Handler]],
) -> Routes:
    """
    Args:
        begin: as of GenerationEndpoint.
        model_name: what clients call the model.
        context_length: tokens of prompt and answer together.
        ignore_unknown: take requests with fields that nobody knows as if they had none.
        why_not_ready: a sentence, or None when a request could be placed now.
        others: what is beside OpenAI's API, by path, by method.
        others_below: the same for every path that begins with this one.
    """
    operations = Operations(model_name, context_length, why_not_ready)

    def generation(dialect: Completions | Chat) -> GenerationEndpoint:
        return GenerationEndpoint(dialect, generator, metrics, begin, model_name=model_name)

    return Routes(
        {
            "/v1/completions": {"POST": generation(Completions(ignore_unknown=ignore_unknown))},
            "/v1/chat/completions": {"POST": generation(Chat(ignore_unknown=ignore_unknown))},
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
