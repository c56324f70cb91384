"""/v1/rerank, and /v1/score for vLLM's similarity and SGLang's next-token likelihood."""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from api.dialect.fields import TokenId
from api.dialect.generation_endpoint import RequestOrigin
from api.dialect.problems import ApiError, invalid
from api.pooling.endpoint import PoolingFields, PoolingUsage, Texts
from api.pooling.vectors import PoolingService
from api.requests.generate_params import (
    MAX_PROMPTS,
    PooledPrompt,
    PoolingCaller,
    TextPrompt,
    TokenIdsPrompt,
)
from common.requests.pooling import MAX_LABEL_TOKENS

_Ids = list[TokenId]
_Labels = Annotated[list[TokenId], msgspec.Meta(min_length=1, max_length=MAX_LABEL_TOKENS)]


class ScoreFields(PoolingFields, kw_only=True):
    text_1: str | Texts | None = None
    text_2: str | Texts | None = None
    queries: str | Texts | None = None
    documents: str | Texts | None = None
    query: str | _Ids | None = None
    items: str | list[str | _Ids] | None = None
    label_token_ids: _Labels | None = None
    apply_softmax: bool | None = None
    item_first: bool | None = None


class ScoreItem(msgspec.Struct):
    index: int
    object: str
    score: float


class ScoreList(msgspec.Struct):
    """vLLM's form of the response."""

    id: str
    object: str
    created: int
    model: str
    data: Sequence[ScoreItem]
    usage: PoolingUsage


class LabelScoreList(msgspec.Struct):
    """SGLang's form of the response: the scores of the labels for each item."""

    scores: Sequence[Sequence[float]]
    model: str
    usage: PoolingUsage
    object: str


async def score(
    service: PoolingService, fields: ScoreFields, caller: PoolingCaller, origin: RequestOrigin
) -> bytes:
    """Return the response of /v1/score."""
    if fields.query is not None or fields.items is not None:
        return await _labels(service, fields, caller, origin)
    scored = await service.score(_pairs(fields), caller)
    return msgspec.json.encode(
        ScoreList(
            origin.id,
            "list",
            origin.created,
            origin.model,
            [ScoreItem(index, "score", score) for index, score in enumerate(scored.scores)],
            PoolingUsage(scored.num_tokens, scored.num_tokens),
        )
    )


async def _labels(
    service: PoolingService, fields: ScoreFields, caller: PoolingCaller, origin: RequestOrigin
) -> bytes:
    if not fields.label_token_ids:
        raise invalid("label_token_ids", "is missing")
    scored = await service.label_scores(
        _items(fields), fields.label_token_ids, caller, softmax=bool(fields.apply_softmax)
    )
    usage = PoolingUsage(scored.num_tokens, scored.num_tokens)
    return msgspec.json.encode(LabelScoreList(scored.scores, origin.model, usage, "scoring"))


def _pairs(fields: ScoreFields) -> Sequence[tuple[str, str]]:
    """Return pairs of texts: one text with each other text, or texts paired by index."""
    first = fields.text_1 if fields.text_1 is not None else fields.queries
    second = fields.text_2 if fields.text_2 is not None else fields.documents
    if first is None or second is None:
        missing = "text_1" if first is None else "text_2"
        raise invalid(missing, "is missing: set text_1 and text_2, or query and items")
    ones = [first] if isinstance(first, str) else first
    others = [second] if isinstance(second, str) else second
    if len(ones) == 1:
        ones = ones * len(others)
    if len(ones) != len(others):
        sentence = f"text_1 has {len(ones)} texts and text_2 {len(others)}: expected equal numbers"
        raise ApiError(400, sentence, param="text_2")
    return list(zip(ones, others, strict=True))


def _items(fields: ScoreFields) -> Sequence[PooledPrompt]:
    """Return prompts that join the query and each item, as texts or as token ids."""
    query, given = fields.query, fields.items
    items = [given] if isinstance(given, str) else given
    if not query or not items:
        missing = "query" if not query else "items"
        raise invalid(missing, "is missing or empty")
    if len(items) > MAX_PROMPTS:
        raise invalid("items", f"has {len(items)}, {MAX_PROMPTS} allowed")
    prompts: list[PooledPrompt] = []
    for item in items:
        one, other = (item, query) if fields.item_first else (query, item)
        match one, other:
            case str(), str():
                prompts.append(TextPrompt(one + other))
            case list(), list():
                prompts.append(TokenIdsPrompt([*one, *other]))
            case _:
                sentence = "query and items are both texts, or both token ids"
                raise ApiError(400, sentence, param="items")
    return prompts


# /rerank and /v1/rerank order documents by relevance to a query, compatible with Jina, Cohere and
# vLLM.
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


async def rerank(
    service: PoolingService, fields: RerankFields, caller: PoolingCaller, origin: RequestOrigin
) -> bytes:
    """Return the response of /v1/rerank."""
    documents = [each if isinstance(each, str) else each.text for each in fields.documents]
    pairs = [(fields.query, text) for text in documents]
    scored = await service.score(pairs, caller, fields.instruct)
    # The sort is stable: equal scores keep the order of the documents.
    order = sorted(range(len(documents)), key=lambda index: -scored.scores[index])
    returned = fields.return_documents is not False
    results = [
        RankedDocument(
            index, scored.scores[index], Document(documents[index]) if returned else None
        )
        for index in order[: fields.top_n or None]
    ]
    usage = PoolingUsage(scored.num_tokens, scored.num_tokens)
    return msgspec.json.encode(RerankResponse(origin.id, origin.model, usage, results))
