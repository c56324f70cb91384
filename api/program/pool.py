"""Construction of a served model's pool: its nodes, and the parts that serve its requests."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeAlias

from api.dialect.models import ModelNames
from api.generation import Dispatcher
from api.pooling.pooler import Pooler
from api.pooling.vectors import PoolingService, qwen3
from api.program.nodes import ModelBase, ModelNodes, RouterBase, make_model, make_nodes
from api.requests.idempotency import MAX_BYTES, IdempotencyCache
from api.requests.limiter import PriorityLimits, RequestLimiter
from api.text.model_files import ModelFiles
from common.config import RouterConfig
from router.record import RequestRecords


@dataclass(frozen=True, slots=True)
class ModelPool:
    """One served model: its nodes, and the parts that serve its requests.

    Attributes:
        names: model names that clients may use.
    """

    nodes: ModelNodes
    answers: IdempotencyCache
    vectors: PoolingService
    names: ModelNames

    @property
    def base(self) -> ModelBase:
        return self.nodes.base

    @property
    def admission(self) -> RequestLimiter:
        return self.nodes.base.admission


async def make_pool(
    base: RouterBase, config: RouterConfig, files: ModelFiles, resources: ExitStack
) -> ModelPool:
    """Make the pool of one model.

    Args:
        config: the router's, with the values of this model.
        resources: closes it.
    Raises:
        ConfigError: the tokenizer, the chat template or an entry of its nodes is invalid, or the
            model cannot make the configured vectors or scores.
    """
    of_model = make_model(base, config, files, resources)
    nodes = await make_nodes(base, of_model)
    model = of_model.model
    records = RequestRecords(of_model.metrics, of_model.timelines)
    limits = {"budget_s": config.request_timeout_s, "queue_share": config.max_queue_fraction}
    generator = Dispatcher(
        model,
        nodes.cluster,
        of_model.admission,
        records,
        **limits,
        priorities=PriorityLimits(
            config.clients.priority,
            low_values_first=config.clients.low_priority_values_first,
        ),
        returns_cached_tokens=not config.hide_cached_tokens,
        stream_interval=config.stream_interval,
    )
    vectors = PoolingService(
        Pooler(model, nodes.pooling, of_model.admission, records, **limits),
        model.files.pooling,
        way=config.pooling_type,
        reranker=qwen3(model.tokenizer) if config.reranker == "qwen3" else None,
        has_nodes=bool(config.prefill),
    )
    answers = IdempotencyCache(
        generator,
        keep_s=config.idempotency_ttl_s,
        max_bytes=MAX_BYTES // len(base.config.each_model),  # of all models together
    )
    names = ModelNames(of_model.name, nodes.cluster.adapters.by_name)
    return ModelPool(nodes, answers, vectors, names)


Pools: TypeAlias = Mapping[str, ModelPool]  # by served model
