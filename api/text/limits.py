"""Limits of the model in tokens and bytes, and checks of token ids.

A prompt is rejected by its bytes before its tokens are counted. No text that fits the context has
more bytes than as many of the longest tokens. For vocabularies with very long tokens, such as a
hundred spaces, the limit is lower. Text of such tokens only is not a useful prompt. Text counts in
full, even if the tokenizer drops it or encodes it as one token of any length.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import InvalidRequest
from common.rpc import MAX_MESSAGE_BYTES

# Limit of one conversation. A template takes 3 us for each message and blocks the event loop.
MAX_MESSAGES = 4096
MAX_SETTINGS_BYTES = 16 << 10  # of a template's own settings, as JSON
MAX_VALUES = 1 << 16  # of JSON that is written in a text
MAX_TOOLS = 1024
MAX_CHOICES = 128  # of one HTTP request
MAX_FIELDS = 1 << 15  # of a gRPC message. A conversation has three for each message

_TEXT_BYTES_PER_TOKEN = 32  # upper limit. English and code have four to five, an emoji as many
_ROOM_BYTES = 1 << 20  # of a message, beside its prompts: names, tools, stop strings
_BYTES_PER_TOKEN = 8  # of prompts in an HTTP body with many. Ids have up to seven


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of the model."""

    context_length: int  # tokens of prompt and response together
    vocabulary_size: int
    longest_token_bytes: int  # of the text of one token
    sees_images: bool = False

    @property
    def text_bytes(self) -> int:
        """Return the size limit of one prompt, as UTF-8."""
        return self.context_length * min(self.longest_token_bytes, _TEXT_BYTES_PER_TOKEN)

    @property
    def message_bytes(self) -> int:
        """Return the size limit of a gRPC message, which has one prompt."""
        if self.sees_images:
            return MAX_MESSAGE_BYTES
        return min(_ROOM_BYTES + self.text_bytes, MAX_MESSAGE_BYTES)

    @property
    def body_bytes(self) -> int:
        """Return the size limit of an HTTP body, which has a prompt or a list of them."""
        if self.sees_images:
            return MAX_MESSAGE_BYTES
        prompts = MAX_CHOICES * self.context_length * _BYTES_PER_TOKEN
        return min(_ROOM_BYTES + max(prompts, self.text_bytes), MAX_MESSAGE_BYTES)


def check_prompt(token_ids: Sequence[int], limits: ModelLimits, field: str) -> None:
    """Raise InvalidRequest unless the prompt has tokens, all known, and leaves room for one."""
    if not token_ids:
        raise InvalidRequest(f"{field} is empty: a prompt has at least one token")
    check_length(token_ids, limits, field)
    check_vocabulary(token_ids, limits, field)


def check_length(token_ids: Sequence[int], limits: ModelLimits, field: str) -> None:
    """Raise InvalidRequest unless the prompt leaves room for a token. Checks only the length."""
    if len(token_ids) >= limits.context_length:
        raise InvalidRequest(
            f"{field} has {len(token_ids)} tokens; the context of {limits.context_length} tokens "
            f"takes prompts of at most {limits.context_length - 1}"
        )


def check_context(token_ids: Sequence[int], limits: ModelLimits, field: str) -> None:
    """Raise InvalidRequest for more tokens than the context. Checks only the length."""
    if len(token_ids) > limits.context_length:
        raise InvalidRequest(
            f"{field} has {len(token_ids)} tokens; the context has {limits.context_length}"
        )


def check_vocabulary(token_ids: Sequence[int], limits: ModelLimits, field: str) -> None:
    """Raise InvalidRequest naming the first id that is outside the vocabulary."""
    if token_ids and max(token_ids) >= limits.vocabulary_size:
        index = next(i for i, token in enumerate(token_ids) if token >= limits.vocabulary_size)
        raise InvalidRequest(
            f"{field}[{index}] is {token_ids[index]}, out of the vocabulary "
            f"of {limits.vocabulary_size} tokens"
        )
