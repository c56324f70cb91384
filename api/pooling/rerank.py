"""/rerank and /v1/rerank: documents by relevance to a query.

Compatible with Jina, Cohere and vLLM.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from api.dialect.origin import RequestOrigin
from api.pooling.endpoint import PoolingFields, PoolingUsage
from api.pooling.vectors import PoolingCaller, PoolingService
from api.requests.pooled import MAX_PROMPTS


class Document(msgspec.Struct):
    text: str


class RerankFields(PoolingFields, kw_only=True):
    query: str
    documents: Annotated[list[str | Document], msgspec.Meta(min_length=1, max_length=MAX_PROMPTS)]
    instruct: str | None = None
    top_n: Annotated[int, msgspec.Meta(ge=0)] | None = None
    return_documents: bool | None = None


class RankedDocument(msgspec.Struct, omit_defaults=True):
    index: int
    relevance_score: float
    document: Document | None = None


class RerankResponse(msgspec.Struct):
    id: str
    model: str
    usage: PoolingUsage
    results: Sequence[RankedDocument]


class RerankEndpoint:
    """The responses of /v1/rerank."""

    def __init__(self, vectors: PoolingService) -> None:
        self._vectors = vectors

    async def answer(
        self, fields: RerankFields, asker: PoolingCaller, origin: RequestOrigin
    ) -> bytes:
        documents = [each if isinstance(each, str) else each.text for each in fields.documents]
        scored = await self._vectors.score(
            [(fields.query, text) for text in documents], asker, fields.instruct
        )
        # The sort is stable: equal scores keep the order of the documents.
        order = sorted(range(len(documents)), key=lambda index: -scored.scores[index])
        told = fields.return_documents is not False
        results = [
            RankedDocument(
                index, scored.scores[index], Document(documents[index]) if told else None
            )
            for index in order[: fields.top_n or None]
        ]
        usage = PoolingUsage(scored.num_tokens, scored.num_tokens)
        return msgspec.json.encode(RerankResponse(origin.id, origin.model, usage, results))
