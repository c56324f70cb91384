"""Input embeddings: a prompt as inputs of the first layer, without token ids.

Each token of such a prompt has the same id, above all vocabularies. Its KV is cached in a namespace
of its own, which depends on all embeddings. Code that compares prompts by namespace and tokens
therefore recognises equal embeddings, and never takes other ones for them.
"""

from hashlib import blake2b
from typing import Self

import msgspec

from common.errors import InvalidRequest, check_at_most
from common.limits import MAX_EMBEDDING_BYTES
from common.requests.images import FIRST_IMAGE_TOKEN
from common.requests.namespace import BYTES_PER_TOKEN, IDENTITY_BYTES, as_bytes

GIVEN_TOKEN = FIRST_IMAGE_TOKEN  # the id of each token
NUMBER_BYTES = 4
LARGEST = 65504.0  # of float16, in which a model may compute
NOT_ACCEPTED = (
    "input_embeddings: this server does not accept them. engine.input_embeddings.enabled of its "
    "nodes allows it"
)
_GIVEN = as_bytes([GIVEN_TOKEN])


class InputEmbeddings(msgspec.Struct, frozen=True):
    """The embeddings of a prompt.

    Attributes:
        values: little-endian float32 [num_tokens, hidden size].
        num_tokens: of the prompt.
        name: hash of the values.
    """

    values: bytes
    num_tokens: int
    name: bytes

    @classmethod
    def of(cls, values: bytes, num_tokens: int) -> Self:
        """Return the embeddings of so many tokens. Raise InvalidRequest if they have no such shape,
        or too many bytes."""
        check_at_most("input_embeddings", len(values), "bytes", MAX_EMBEDDING_BYTES)
        if not num_tokens or not values or len(values) % (NUMBER_BYTES * num_tokens):
            raise InvalidRequest(
                f"input_embeddings: {len(values)} bytes are not float32 [{num_tokens}, hidden size]"
            )
        return cls(values, num_tokens, blake2b(values, digest_size=IDENTITY_BYTES).digest())


def from_proto(values: bytes, prompt: bytes) -> InputEmbeddings | None:
    """Parse the embeddings of a prompt. Return None without any.

    Args:
        prompt: its ids, in the form of `as_bytes`.
    Raises:
        InvalidRequest: they do not fit the prompt.
    """
    if not values:
        return None
    given = InputEmbeddings.of(values, len(prompt) // BYTES_PER_TOKEN)
    if prompt != _GIVEN * (len(prompt) // BYTES_PER_TOKEN):
        raise InvalidRequest("input_embeddings: the prompt has token ids, too")
    return given
