"""/v1/embeddings, compatible with OpenAI."""

import asyncio
import base64
from collections.abc import Sequence
from typing import Annotated, Literal, cast

import msgspec

from api.dialect.fields import TokenId
from api.dialect.origin import RequestOrigin
from api.dialect.problems import ApiError
from api.dialect.unknown_fields import Ignored
from api.pooling.endpoint import PoolingFields, PoolingUsage
from api.pooling.vectors import PoolingCaller, PoolingService
from api.requests.generate_params import TextPrompt, TokenIdsPrompt
from api.requests.pooled import MAX_PROMPTS, PooledPrompt, PoolingResult, floats

_AT_ONCE = 16  # vectors encoded before other tasks get a turn

_Ids = list[TokenId]


class EmbeddingFields(PoolingFields, kw_only=True):
    input: str | list[str | TokenId | _Ids]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] | None = None
    add_special_tokens: bool | None = None
    user: Ignored = None


class Embedding(msgspec.Struct):
    object: str
    index: int
    embedding: Sequence[float] | str  # base64: of little-endian float32


class EmbeddingList(msgspec.Struct):
    object: str
    data: Sequence[Embedding]
    model: str
    usage: PoolingUsage


class EmbeddingsEndpoint:
    """The responses of /v1/embeddings."""

    def __init__(self, vectors: PoolingService) -> None:
        self._vectors = vectors

    async def answer(
        self, fields: EmbeddingFields, asker: PoolingCaller, origin: RequestOrigin
    ) -> bytes:
        prompts = _prompts(fields)
        pooled = await self._vectors.embed(prompts, asker, fields.dimensions or 0)
        as_text = fields.encoding_format == "base64"
        return await _written(pooled, origin, as_text=as_text)


def _prompts(fields: EmbeddingFields) -> Sequence[PooledPrompt]:
    special = fields.add_special_tokens is not False
    given = fields.input
    if isinstance(given, str):
        return [TextPrompt(given, special)]
    if len(given) > MAX_PROMPTS and type(given[0]) is not int:
        raise ApiError(400, f"input has {len(given)} texts, {MAX_PROMPTS} allowed", param="input")
    match {type(item) for item in given}:
        case kinds if not kinds:
            raise ApiError(400, "input is empty", param="input")
        case kinds if kinds == {int}:
            return [TokenIdsPrompt(cast(list[int], given))]
        case kinds if kinds == {str}:
            return [TextPrompt(text, special) for text in cast(list[str], given)]
        case kinds if kinds == {list}:
            return [TokenIdsPrompt(ids) for ids in cast(list[list[int]], given)]
        case _:
            raise ApiError(400, "input mixes text, token ids and lists of them", param="input")


async def _written(pooled: PoolingResult, origin: RequestOrigin, *, as_text: bool) -> bytes:
    """Return the response body.

    It may have millions of numbers, so other tasks get turns meanwhile.
    """
    parts = []
    for index, vector in enumerate(pooled.vectors):
        told: Sequence[float] | str
        told = base64.b64encode(vector).decode() if as_text else floats(vector).tolist()
        parts.append(msgspec.json.encode(Embedding("embedding", index, told)))
        if index % _AT_ONCE == _AT_ONCE - 1:
            await asyncio.sleep(0)
    num_tokens = sum(pooled.num_tokens)
    head = EmbeddingList("list", [], origin.model, PoolingUsage(num_tokens, num_tokens))
    # The record is encoded with empty data, and the data is inserted in its place.
    before, _, after = msgspec.json.encode(head).partition(b"[]")
    return b"".join((before, b"[", b",".join(parts), b"]", after))
