"""All paths of the router's HTTP port."""

from collections.abc import Callable

from common.metrics import RouterMetrics
from router.generation import Generator
from router.http.routes import Routes
from router.openai import problems
from router.openai.chat import Chat
from router.openai.completions import Completions
from router.openai.generation_endpoint import GenerationEndpoint
from router.openai.operations import MODELS_PATH, Operations


def routes(
    generator: Generator,
    metrics: RouterMetrics,
    *,
    model_name: str,
    context_length: int,
    why_not_ready: Callable[[], str | None],
) -> Routes:
    """
    Args:
        model_name: what clients call the model.
        context_length: tokens of prompt and answer together.
        why_not_ready: a sentence, or None when a request could be placed now.
    """
    operations = Operations(model_name, context_length, metrics.registry, why_not_ready)

    def generation(dialect: Completions | Chat) -> GenerationEndpoint:
        return GenerationEndpoint(dialect, generator, metrics, model_name=model_name)

    return Routes(
        {
            "/v1/completions": {"POST": generation(Completions())},
            "/v1/chat/completions": {"POST": generation(Chat())},
            MODELS_PATH: {"GET": operations.models},
            "/health": {"GET": operations.health},
            "/ready": {"GET": operations.ready},
            "/metrics": {"GET": operations.metrics},
        },
        {f"{MODELS_PATH}/": {"GET": operations.model}},
        problems.error_body,
    )
