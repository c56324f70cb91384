"""Limits of what this node can serve, checked once before a request is queued."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.errors import InvalidRequest
from common.page_tables import PageTables
from common.request import RequestSpec
from common.requests.images import Image
from common.requests.pooling import PoolingMode, PoolingParams
from common.requests.sampling import SamplingParams
from engine.batch.image_tokens import text_of
from engine.batch.request import Ints

# Bytes of hidden states of all requests of a node together, twice as many with replays. All of them
# may wait for one peer, and a stream ends if more than 32 MiB wait (common/rpc/streams.py).
MAX_HELD_HIDDEN_STATE_BYTES = 12 << 20


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of the model and of the page pool.

    context_length counts prompt and output. num_pages is the whole pool. generates, num_labels: the
    heads that the model has. image_token_side: pixels per side of an image token; 0: no image
    input. image_tokens_per_side: rows and columns of every image; 0: any. eos_token_ids: tokens
    that end a response. hidden_state_bytes: of one hidden state. max_hidden_state_bytes: of all
    that one request may have returned; 0: none are returned.
    """

    context_length: int
    vocabulary_size: int
    tables: PageTables
    num_pages: int
    generates: bool = True
    num_labels: int = 0
    image_token_side: int = 0
    image_tokens_per_side: int = 0
    eos_token_ids: tuple[int, ...] = ()
    hidden_state_bytes: int = 0
    max_hidden_state_bytes: int = 0

    def check_request(self, spec: RequestSpec) -> None:
        """Raise InvalidRequest, with an error that names the field, for a request that can never be
        served."""
        self.check(np.frombuffer(spec.token_ids, np.int32), spec.images)
        self.check_sampling(spec.sampling, spec.images)
        if spec.sampling.hidden_states:
            self._check_hidden_states(self.hidden_states_of(spec))
        if spec.prediction:
            self.check_prediction(np.frombuffer(spec.prediction, np.int32))

    def check_sampling(self, sampling: SamplingParams, images: Sequence[Image] = ()) -> None:
        """Raise InvalidRequest if a token written to the logits is outside the vocabulary, or if
        the model has no logits. The error names the field."""
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

    def hidden_states_of(self, spec: RequestSpec) -> int:
        """Return the largest number of hidden states that a request has returned."""
        sampling = spec.sampling
        if not sampling.hidden_states:
            return 0
        of_prompt = max(spec.num_prompt - sampling.first_prompt_logprob, 0)
        num_tokens = sampling.max_tokens - spec.num_generated
        return num_tokens + (of_prompt if sampling.prompt_logprobs >= 0 else 0)

    def _check_hidden_states(self, num_states: int) -> None:
        """Raise InvalidRequest if so many hidden states may not be returned."""
        if not self.max_hidden_state_bytes:
            raise InvalidRequest(
                "return_hidden_states: this server does not return hidden states. "
                "engine.hidden_states.enabled of its nodes allows it"
            )
        if num_states * self.hidden_state_bytes > self.max_hidden_state_bytes:
            raise InvalidRequest(
                f"return_hidden_states: {num_states} hidden states of {self.hidden_state_bytes} "
                f"bytes, {self.max_hidden_state_bytes} bytes are allowed. Shorten the prompt or "
                "reduce max_tokens"
            )

    def check_pooling(self, pooling: PoolingParams) -> None:
        """Raise InvalidRequest if the model has no such head or a token is outside the
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
        """Raise InvalidRequest, as `check` does, if a response can never equal this text."""
        self._check_known("prediction", token_ids)
        if len(token_ids) >= self.context_length:
            raise InvalidRequest(
                f"prediction: {len(token_ids)} tokens in a context of {self.context_length}"
            )

    def check(self, token_ids: Ints, images: Sequence[Image] = ()) -> None:
        """Raise InvalidRequest if the tokens can never be served with at least one more token. The
        error names the field.

        Args:
            token_ids: the prompt, then the tokens generated earlier.
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
        self._check_known("token_ids", text_of(token_ids, images) if images else token_ids)
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
                    f"images[{number}]: the model sees no images"
                    if not self.image_token_side
                    else f"images[{number}]: a token of it is no square of "
                    f"{self.image_token_side} pixels a side"
                )
            if count and (image.rows, image.columns) != (count, count):
                raise InvalidRequest(
                    f"images[{number}]: it has {image.rows} x {image.columns} tokens, the model "
                    f"takes {count} x {count}"
                )

    def _check_known(self, field: str, token_ids: Ints) -> None:
        low, high = int(token_ids.min(initial=0)), int(token_ids.max(initial=0))
        if low < 0 or high >= self.vocabulary_size:
            wrong = low if low < 0 else high
            raise InvalidRequest(
                f"{field}: {wrong} is outside the vocabulary of {self.vocabulary_size}"
            )
