"""Requests for embeddings or scores, independent of the protocol, and their results."""

import sys
from array import array
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from api.requests.generate_params import Text, TextPair, TokenIds
from common.requests.pooling import Pooling

MAX_PROMPTS = 2048
MAX_TOKENS = 1 << 20  # of all prompts of one request

PooledPrompt: TypeAlias = Text | TextPair | TokenIds


class WantedVectors(msgspec.Struct, frozen=True, kw_only=True):
    prompts: Sequence[PooledPrompt]
    pooling: Pooling
    dimensions: int = 0  # number of leading dimensions to keep. 0: all
    normalize: bool = False
    request_id: str = ""  # see Wanted
    label: str = ""
    cache_salt: str | None = None
    timeout_s: float | None = None


class Pooled(msgspec.Struct, frozen=True):
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
