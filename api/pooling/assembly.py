"""The routes of embeddings and scores."""

from collections.abc import Mapping

from api.dialect.bodies import BodyReader
from api.dialect.generation_endpoint import Begin
from api.dialect.ignored_fields import IgnoredFields, only
from api.dialect.models import ModelNames
from api.http.messages import Handler
from api.pooling.endpoint import EmbeddingFields, F, PoolingAnswer, PoolingEndpoint, embeddings
from api.pooling.scores import RerankFields, ScoreFields, rerank, score
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
