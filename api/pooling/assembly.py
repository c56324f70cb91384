"""The routes of embeddings and scores."""

from collections.abc import Mapping

from api.dialect.generation_endpoint import Begin
from api.dialect.model_names import ModelNames
from api.http.request import Handler
from api.pooling.embeddings import EmbeddingFields, EmbeddingsEndpoint
from api.pooling.endpoint import PoolingEndpoint
from api.pooling.ignored_fields import OF_EMBEDDINGS, OF_RERANK, OF_SCORE
from api.pooling.rerank import RerankEndpoint, RerankFields
from api.pooling.scores import ScoreFields, ScoreResponses
from api.pooling.vectors import PoolingService
from router.metrics import RouterMetrics


def pooling_routes(
    vectors: PoolingService,
    metrics: RouterMetrics,
    begin: Begin,
    *,
    names: ModelNames,
    ignore_unknown: bool,
) -> Mapping[str, Mapping[str, Handler]]:
    """Return handlers by path and method. For arguments see PoolingEndpoint."""
    embeddings = PoolingEndpoint(
        EmbeddingFields,
        OF_EMBEDDINGS,
        EmbeddingsEndpoint(vectors).answer,
        metrics,
        begin,
        id_prefix="embd-",
        names=names,
        ignore_unknown=ignore_unknown,
    )
    score = PoolingEndpoint(
        ScoreFields,
        OF_SCORE,
        ScoreResponses(vectors).answer,
        metrics,
        begin,
        id_prefix="score-",
        names=names,
        ignore_unknown=ignore_unknown,
    )
    rerank = PoolingEndpoint(
        RerankFields,
        OF_RERANK,
        RerankEndpoint(vectors).answer,
        metrics,
        begin,
        id_prefix="rerank-",
        names=names,
        ignore_unknown=ignore_unknown,
    )
    return {
        "/v1/embeddings": {"POST": embeddings},
        "/v1/score": {"POST": score},
        "/score": {"POST": score},
        "/v1/rerank": {"POST": rerank},
        "/rerank": {"POST": rerank},
    }
