"""The paths of vectors and scores."""

from collections.abc import Mapping

from common.metrics.router import RouterMetrics
from router.api.dialect.generation_endpoint import Begin
from router.api.dialect.model_names import ModelNames
from router.api.http.request import Handler
from router.api.pooling.embeddings import EmbeddingFields, Embeddings
from router.api.pooling.endpoint import PoolingEndpoint
from router.api.pooling.harmless import OF_EMBEDDINGS, OF_RERANK, OF_SCORE
from router.api.pooling.rerank import RerankFields, Reranking
from router.api.pooling.scores import ScoreAnswers, ScoreFields
from router.pooling.vectors import Vectors


def pooling_routes(
    vectors: Vectors,
    metrics: RouterMetrics,
    begin: Begin,
    *,
    names: ModelNames,
    ignore_unknown: bool,
) -> Mapping[str, Mapping[str, Handler]]:
    """By path, by method. Arguments as of PoolingEndpoint."""
    embeddings = PoolingEndpoint(
        EmbeddingFields,
        OF_EMBEDDINGS,
        Embeddings(vectors).answer,
        metrics,
        begin,
        id_prefix="embd-",
        names=names,
        ignore_unknown=ignore_unknown,
    )
    score = PoolingEndpoint(
        ScoreFields,
        OF_SCORE,
        ScoreAnswers(vectors).answer,
        metrics,
        begin,
        id_prefix="score-",
        names=names,
        ignore_unknown=ignore_unknown,
    )
    rerank = PoolingEndpoint(
        RerankFields,
        OF_RERANK,
        Reranking(vectors).answer,
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
