"""Pooling requests: a vector or scores for a prompt, without generated tokens."""

from enum import IntEnum

import msgspec

from common.errors import InvalidRequest, check_at_most

MAX_LABEL_TOKENS = 256


class PoolingMode(IntEnum):
    """Methods to pool the hidden states of a prompt, with the numbers of pooling.proto."""

    LAST = 1  # last token
    MEAN = 2  # mean of all tokens
    FIRST = 3  # first token, "cls"
    LABELS = 4  # output of the model's classification head for the last token
    TOKENS = 5  # log-probabilities of given tokens as the next token


class PoolingParams(msgspec.Struct, frozen=True):
    """A pooling request.

    Attributes:
        tokens: token ids, only with PoolingMode.TOKENS.
    """

    pool: PoolingMode
    tokens: tuple[int, ...] = ()

    @property
    def of_all(self) -> bool:
        """True if hidden states of all tokens are needed, including cached ones."""
        return self.pool in (PoolingMode.MEAN, PoolingMode.FIRST)


def check(pooling: PoolingParams) -> None:
    """Check a pooling request. Raises InvalidRequest with the field's name."""
    check_at_most("label_token_ids", len(pooling.tokens), "tokens", MAX_LABEL_TOKENS)
    if pooling.pool is PoolingMode.TOKENS and not pooling.tokens:
        raise InvalidRequest("label_token_ids is empty: at least one token is required")
    if pooling.pool is not PoolingMode.TOKENS and pooling.tokens:
        raise InvalidRequest("label_token_ids is not allowed for embeddings")
