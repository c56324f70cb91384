"""The routes of embeddings and scores."""

from collections.abc import Mapping

from api.dialect.generation_endpoint import Begin, ModelNames
from api.dialect.ignored_fields import IgnoredFields, only
from api.http.messages import Handler
from api.pooling.endpoint import (
    EmbeddingFields,
    EmbeddingsEndpoint,
    F,
    PoolingAnswer,
    PoolingEndpoint,
)
from api.pooling.scores import RerankEndpoint, RerankFields, ScoreFields, ScoreResponses
from api.pooling.vectors import PoolingService
from router.metrics import RouterMetrics

_NEVER = only()
# Known fields that are unsupported, with the values that change nothing.
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
    """Return handlers by path and method. For arguments see PoolingEndpoint."""

    def endpoint(
        fields: type[F],
        unsupported: Mapping[str, IgnoredFields],
        answer: PoolingAnswer[F],
        id_prefix: str,
    ) -> Handler:
        return PoolingEndpoint(
            fields,
            unsupported,
            answer,
            metrics,
            begin,
            id_prefix=id_prefix,
            names=names,
            ignore_unknown=ignore_unknown,
        )

    embeddings = endpoint(
        EmbeddingFields, OF_EMBEDDINGS, EmbeddingsEndpoint(vectors).answer, "embd-"
    )
    score = endpoint(ScoreFields, OF_SCORE, ScoreResponses(vectors).answer, "score-")
    rerank = endpoint(RerankFields, OF_RERANK, RerankEndpoint(vectors).answer, "rerank-")
    return {
        "/v1/embeddings": {"POST": embeddings},
        "/v1/score": {"POST": score},
        "/score": {"POST": score},
        "/v1/rerank": {"POST": rerank},
        "/rerank": {"POST": rerank},
    }
