"""Construction of the parts of a router that serve requests, for every client protocol."""

from dataclasses import dataclass

from api.dialect.model_names import ModelNames
from api.generation import Dispatcher
from api.pooling.pooler import Pooler
from api.pooling.vectors import PoolingService
from api.pooling.yes_or_no import qwen3
from api.program.nodes import RouterNodes
from api.requests.idempotency import IdempotencyCache
from api.requests.priorities import PriorityLimits
from router.record import RequestRecords


@dataclass(frozen=True, slots=True)
class RequestParts:
    """The parts of a router that serve requests.

    Attributes:
        names: model names that clients may use.
    """

    answers: IdempotencyCache
    vectors: PoolingService
    names: ModelNames


def make_requests(nodes: RouterNodes) -> RequestParts:
    """Make these parts.

    Raises:
        ConfigError: the model cannot make the configured vectors or scores.
    """
    base = nodes.base
    config, model = base.config, base.model
    records = RequestRecords(base.metrics, base.timelines)
    limits = {"budget_s": config.request_timeout_s, "queue_share": config.max_queue_fraction}
    generator = Dispatcher(
        model,
        nodes.cluster,
        base.admission,
        records,
        **limits,
        priorities=PriorityLimits(
            config.clients.priority,
            low_values_first=config.clients.low_priority_values_first,
        ),
        tells_cached_tokens=not config.hide_cached_tokens,
    )
    vectors = PoolingService(
        Pooler(model, nodes.pooling, base.admission, records, **limits),
        model.files.pooling,
        way=config.pooling_type,
        reranker=qwen3(model.tokenizer) if config.reranker == "qwen3" else None,
        has_nodes=bool(config.prefill),
    )
    name = config.served_model_name or model.files.name
    names = ModelNames(name, nodes.cluster.adapters.by_name)
    return RequestParts(
        IdempotencyCache(generator, keep_s=config.idempotency_ttl_s), vectors, names
    )
