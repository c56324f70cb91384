"""What is wanted of a prompt that no token is to follow."""

from enum import IntEnum

import msgspec

from common.errors import InvalidRequest

MAX_TOLD_TOKENS = 256


class Pool(IntEnum):
    """What is made of a prompt's hidden states. The numbers of pooling.proto."""

    LAST = 1  # that of its last token
    MEAN = 2  # of all its tokens
    FIRST = 3  # that of its first token, "cls"
    LABELS = 4  # what the model's head for classes says of the last one
    TOKENS = 5  # log-probabilities of some tokens, were one to follow the last


class Pooling(msgspec.Struct, frozen=True):
    """
    tokens: ids, with Pool.TOKENS only.
    """

    pool: Pool
    tokens: tuple[int, ...] = ()

    @property
    def of_all(self) -> bool:
        """Whether tokens are needed whose KV a cache may have: then all are computed."""
        return self.pool in (Pool.MEAN, Pool.FIRST)


def check(pooling: Pooling) -> None:
    """Raises InvalidRequest with a sentence that names the field."""
    if len(pooling.tokens) > MAX_TOLD_TOKENS:
        raise InvalidRequest(
            f"label_token_ids has {len(pooling.tokens)} tokens, {MAX_TOLD_TOKENS} allowed"
        )
    if pooling.pool is Pool.TOKENS and not pooling.tokens:
        raise InvalidRequest("label_token_ids is empty: of no token a probability is wanted")
    if pooling.pool is not Pool.TOKENS and pooling.tokens:
        raise InvalidRequest("label_token_ids: a vector is wanted, and no probabilities")
