"""Requests for embeddings or scores, independent of the protocol, and their results."""

import sys
from array import array
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from api.requests.generate_params import TextPairPrompt, TextPrompt, TokenIdsPrompt
from common.requests.pooling import PoolingParams

MAX_PROMPTS = 2048
MAX_TOKENS = 1 << 20  # of all prompts of one request

PooledPrompt: TypeAlias = TextPrompt | TextPairPrompt | TokenIdsPrompt


class PoolingRequest(msgspec.Struct, frozen=True, kw_only=True):
    prompts: Sequence[PooledPrompt]
    pooling: PoolingParams
    dimensions: int = 0  # number of leading dimensions to keep. 0: all
    normalize: bool = False
    request_id: str = ""  # see Wanted
    label: str = ""
    cache_salt: str | None = None
    timeout_s: float | None = None


class PoolingResult(msgspec.Struct, frozen=True):
    """Vectors and token counts in the order of the prompts."""

    vectors: Sequence[bytes]  # little-endian float32
    num_tokens: Sequence[int]
    cached_tokens: int


def floats(vector: bytes) -> "array[float]":
    """Return a vector's numbers. Raise ValueError if the bytes are not float32."""
    found = array("f")
    found.frombytes(vector)
    if sys.byteorder == "big":
        found.byteswap()
    return found
