"""Limits of one request and of all requests of a node. Nodes check them before they queue a
request."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.errors import InvalidRequest, Overloaded
from common.page_tables import PageTables
from common.request import LARGEST, NOT_ACCEPTED, NUMBER_BYTES, InputEmbeddings, RequestSpec
from common.requests.images import Image
from common.requests.pooling import PoolingMode, PoolingParams
from common.requests.sampling import SamplingParams
from engine.batch.image_tokens import text_of
from engine.batch.request import Ints

# Bytes of hidden states and routed experts of all requests of a node, twice as many with replays.
# All of them may wait for one peer, and a stream ends if more than 32 MiB wait
# (common/rpc/streams.py).
MAX_HELD_STATE_BYTES = 12 << 20
MAX_HELD_EMBEDDING_BYTES = 256 << 20  # input embeddings of all requests of a node together


@dataclass(frozen=True, slots=True)
class StateLimit:
    """The limit of hidden states, or of routed experts, that one request may return.

    token_bytes: bytes per token. max_bytes: limit for all tokens. 0: none are returned.
    """

    name: str
    token_bytes: int = 0
    max_bytes: int = 0

    def check(self, num_tokens: int) -> None:
        """Raise InvalidRequest if this number of tokens exceeds the limit."""
        noun = self.name.replace("_", " ")
        if not self.max_bytes:
            raise InvalidRequest(
                f"return_{self.name}: this server does not return {noun}. "
                f"engine.{self.name}.enabled of its nodes allows it"
            )
        if num_tokens * self.token_bytes > self.max_bytes:
            raise InvalidRequest(
                f"return_{self.name}: {noun} of {num_tokens} tokens with {self.token_bytes} bytes "
                f"each, {self.max_bytes} bytes are allowed. Shorten the prompt or reduce max_tokens"
            )


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of the model and of the page pool.

    Attributes:
        context_length: prompt and output tokens.
        num_pages: the whole pool.
        generates, num_labels: the heads of the model.
        image_token_side: pixels per side of an image token. 0: no image input.
        image_tokens_per_side: rows and columns of every image. 0: any.
        video_frames: frames of a temporal patch. 0: no video input.
        whole_images: see ModelSpec.
        eos_token_ids: tokens that end a response.
        embedding_size: numbers per input embedding. 0: none are accepted.
    """

    context_length: int
    vocabulary_size: int
    tables: PageTables
    num_pages: int
    generates: bool = True
    num_labels: int = 0
    image_token_side: int = 0
    image_tokens_per_side: int = 0
    video_frames: int = 0
    whole_images: bool = False
    eos_token_ids: tuple[int, ...] = ()
    hidden_states: StateLimit = StateLimit("hidden_states")
    routed_experts: StateLimit = StateLimit("routed_experts")
    embedding_size: int = 0

    def check_request(self, spec: RequestSpec) -> None:
        """Raise InvalidRequest for a request that can never be served. The error names the
        field."""
        num_given = 0
        if spec.input_embeddings is not None:
            num_given = spec.input_embeddings.num_tokens
            self._check_embeddings(spec.input_embeddings, spec)
        self.check(np.frombuffer(spec.token_ids, np.int32), spec.images, num_given)
        self.check_sampling(spec.sampling, spec.images)
        for limit in self._returned(spec.sampling):
            limit.check(_num_states(spec))
        if spec.prediction:
            self.check_prediction(np.frombuffer(spec.prediction, np.int32))

    def check_sampling(self, sampling: SamplingParams, images: Sequence[Image] = ()) -> None:
        """Raise InvalidRequest if sampling refers to a token outside the vocabulary, or if the
        model has no logits. The error names the field."""
        if images and sampling.prompt_logprobs >= 0:
            raise InvalidRequest(
                "sampling.prompt_logprobs is not supported for prompts with images"
            )
        if not self.generates:
            raise InvalidRequest("model: it has no language model head and cannot generate")
        named = {
            "logit_bias": [token for token, _ in sampling.logit_bias],
            "allowed_token_ids": sampling.allowed_token_ids,
            "bad_word_ids": [token for word in sampling.bad_word_ids for token in word],
            "stop_token_ids": sampling.stop_token_ids if sampling.min_tokens else (),
            "thought": () if sampling.thought is None else sampling.thought.tokens,
        }
        for field, tokens in named.items():
            if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocabulary_size:
                raise InvalidRequest(
                    f"sampling.{field} has a token outside the vocabulary of {self.vocabulary_size}"
                )

    def state_bytes(self, spec: RequestSpec) -> int:
        """Return the maximum bytes of all hidden states and routed experts that a request
        returns."""
        limits = self._returned(spec.sampling)
        return sum(limit.token_bytes * _num_states(spec) for limit in limits)

    def _returned(self, sampling: SamplingParams) -> Sequence[StateLimit]:
        """Return the limits of the hidden states or routed experts that the request asks for."""
        asked = (
            (self.hidden_states, sampling.hidden_states),
            (self.routed_experts, sampling.routed_experts),
        )
        return [limit for limit, is_asked in asked if is_asked]

    def check_pooling(self, pooling: PoolingParams) -> None:
        """Raise InvalidRequest if the model lacks the requested head or a token is outside the
        vocabulary."""
        if pooling.pool is PoolingMode.LABELS and not self.num_labels:
            raise InvalidRequest("model: it has no classification head")
        if pooling.pool is PoolingMode.TOKENS and not self.generates:
            raise InvalidRequest("model: it has no language model head")
        if pooling.tokens and not 0 <= min(pooling.tokens) <= max(pooling.tokens) < (
            self.vocabulary_size
        ):
            raise InvalidRequest(
                f"label_token_ids has a token outside the vocabulary of {self.vocabulary_size}"
            )

    def check_prediction(self, token_ids: Ints) -> None:
        """Raise InvalidRequest if no response can equal this predicted text. See `check`."""
        self._check_known("prediction", token_ids)
        if len(token_ids) >= self.context_length:
            raise InvalidRequest(
                f"prediction: {len(token_ids)} tokens exceed a context of {self.context_length}"
            )

    def _check_embeddings(self, given: InputEmbeddings, spec: RequestSpec) -> None:
        """Raise InvalidRequest unless the model accepts these embeddings."""
        if not self.embedding_size:
            raise InvalidRequest(NOT_ACCEPTED)
        size, odd = divmod(len(given.values), NUMBER_BYTES * given.num_tokens)
        if odd or size != self.embedding_size:
            raise InvalidRequest(
                f"input_embeddings: rows of {size} numbers, the model's hidden size is "
                f"{self.embedding_size}"
            )
        # Also rejects NaN.
        if not (np.abs(np.frombuffer(given.values, np.float32)) <= LARGEST).all():
            raise InvalidRequest(
                f"input_embeddings: a number is not in [-{LARGEST:g}, {LARGEST:g}]"
            )
        if spec.images or spec.sampling.prompt_logprobs >= 0:
            field = "images" if spec.images else "sampling.prompt_logprobs"
            raise InvalidRequest(f"{field}: not supported with input_embeddings")

    def check(self, token_ids: Ints, images: Sequence[Image] = (), num_given: int = 0) -> None:
        """Raise InvalidRequest if the tokens can never be served with at least one more token. The
        error names the field.

        Args:
            token_ids: the prompt, then the tokens generated earlier.
            num_given: number of leading tokens with input embeddings instead of ids.
        """
        num_tokens = len(token_ids)
        if not num_tokens:
            raise InvalidRequest("token_ids: the prompt is empty")
        if num_tokens >= self.context_length:
            raise InvalidRequest(
                f"token_ids: {num_tokens} tokens leave no room in a context of "
                f"{self.context_length}"
            )
        self._check_images(images)
        known = token_ids[num_given:]
        self._check_known("token_ids", text_of(known, images) if images else known)
        needed = self.tables.pages_to_compute(num_tokens + 1)
        if needed > self.num_pages:
            raise InvalidRequest(
                f"token_ids: {num_tokens} tokens need {needed} KV pages, the pool has "
                f"{self.num_pages}"
            )

    def _check_images(self, images: Sequence[Image]) -> None:
        count = self.image_tokens_per_side
        for number, image in enumerate(images):
            if not image.fits(self.image_token_side):
                raise InvalidRequest(
                    f"images[{number}]: the model does not support images"
                    if not self.image_token_side
                    else f"images[{number}]: each of its tokens must have "
                    f"{self.image_token_side} x {self.image_token_side} pixels"
                )
            if image.frames not in (1, self.video_frames):
                raise InvalidRequest(
                    f"images[{number}]: a temporal patch of {image.frames} frames, the model "
                    "accepts " + (f"{self.video_frames}" if self.video_frames else "no videos")
                )
            if count and (image.rows, image.columns) != (count, count):
                raise InvalidRequest(
                    f"images[{number}]: it has {image.rows} x {image.columns} tokens, the model "
                    f"accepts {count} x {count}"
                )

    def _check_known(self, field: str, token_ids: Ints) -> None:
        # As unsigned numbers, negative ids exceed the vocabulary, too.
        if np.maximum.reduce(token_ids.view(np.uint32), initial=0) >= self.vocabulary_size:
            low, high = int(token_ids.min()), int(token_ids.max())
            wrong = low if low < 0 else high
            raise InvalidRequest(
                f"{field}: {wrong} is outside the vocabulary of {self.vocabulary_size}"
            )


def _num_states(spec: RequestSpec) -> int:
    """Return the maximum number of tokens whose hidden states or experts a request returns."""
    sampling = spec.sampling
    of_prompt = max(spec.num_prompt - sampling.first_prompt_logprob, 0)
    num_tokens = sampling.max_tokens - spec.num_generated
    return num_tokens + (of_prompt if sampling.prompt_logprobs >= 0 else 0)


class TokenBudget:
    """A budget of tokens for requests that are in memory before they can be computed. Engine thread
    only.

    Args:
        most: limit for all requests together. A single request may exceed it.
    """

    def __init__(self, most: int, unit: str = "tokens") -> None:
        self._most = most
        self._unit = unit
        self._by_key: dict[int, int] = {}
        self._num_tokens = 0

    def take(self, key: int, num_tokens: int, *, times: int = 1) -> None:
        """Count `num_tokens` for the request. Raise Overloaded if the total exceeds `times` the
        limit."""
        most = self._most * times
        if self._num_tokens and self._num_tokens + num_tokens > most:
            raise Overloaded(f"the queue is full ({self._num_tokens} of {most} {self._unit})")
        self._by_key[key] = num_tokens
        self._num_tokens += num_tokens

    def drop(self, key: int) -> None:
        """Release the tokens of the request, if any."""
        self._num_tokens -= self._by_key.pop(key, 0)
