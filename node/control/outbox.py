"""Collects one engine step's results of requests and sends one message per router stream."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from common.request import PredictionUsage
from common.requests.logprobs import Logprobs
from node.control.engine_control import FrontendChannel
from node.messages import RequestEnded, StepTokens

MAX_LOGPROB_BYTES = 4 << 20  # of one message, or one request. gRPC and frames have higher limits


class TokenOutbox:
    """The results of a step. Engine thread only.

    Nothing is sent before `flush`. A token is sent before the end of its request, and the tokens of
    one request in the order in which they were added.
    """

    def __init__(self, channel: FrontendChannel) -> None:
        self._channel = channel
        self._streams: list[NDArray[np.uint64]] = []
        self._requests: list[NDArray[np.uint64]] = []
        self._tokens: list[NDArray[np.uint32]] = []
        self._ended: dict[int, list[RequestEnded]] = {}
        self._begun: dict[int, list[tuple[int, int]]] = {}
        self._logprobs: dict[int, list[tuple[int, Logprobs]]] = {}  # by stream
        self._prompts: dict[int, list[tuple[int, Logprobs]]] = {}
        self._predicted: dict[int, list[tuple[int, PredictionUsage]]] = {}
        self._listeners: dict[int, Callable[[StepTokens], None]] = {}

    def listen(self, stream: int, take: Callable[[StepTokens], None]) -> None:
        """Deliver messages to this stream to `take`, a consumer inside the engine."""
        self._listeners[stream] = take

    def tokens(
        self, streams: NDArray[np.uint64], requests: NDArray[np.uint64], tokens: NDArray[np.int32]
    ) -> None:
        """Add columns of new tokens, one entry each. The arrays must not change before `flush`."""
        if len(tokens):
            self._streams.append(streams)
            self._requests.append(requests)
            self._tokens.append(tokens.astype(np.uint32))

    def token(self, origin: tuple[int, int], token: int) -> None:
        stream, request = np.array([origin], np.uint64).T
        self.tokens(stream, request, np.array([token], np.int32))

    def logprobs(self, origin: tuple[int, int], logprobs: Logprobs) -> None:
        """Add the log probabilities of a request's tokens that are added before the next
        `flush`.
        """
        stream, request = origin
        self._logprobs.setdefault(stream, []).append((request, logprobs))

    def prompt_logprobs(self, origin: tuple[int, int], logprobs: Logprobs) -> None:
        """Add the log probabilities of a prompt, with the first token of its request."""
        stream, request = origin
        self._prompts.setdefault(stream, []).append((request, logprobs))

    def predicted(self, origin: tuple[int, int], predicted: PredictionUsage) -> None:
        """Add how much of a request's prediction was right and wrong, with tokens of the
        request.
        """
        stream, request = origin
        self._predicted.setdefault(stream, []).append((request, predicted))

    def begin(self, origin: tuple[int, int], cached_tokens: int) -> None:
        """Report how much of the request's prompt was cached, when its prefill starts and again
        with its first token.
        """
        stream, request = origin
        self._begun.setdefault(stream, []).append((request, cached_tokens))

    def end(self, stream: int, ended: RequestEnded) -> None:
        self._ended.setdefault(stream, []).append(ended)

    def flush(self) -> None:
        if self._streams:
            columns = self._streams, self._requests, self._tokens
            # Most steps have added one array a column.
            streams, requests, tokens = (
                column[0] if len(column) == 1 else np.concatenate(column) for column in columns
            )
            for stream in set(streams.tolist()):
                mine = streams == stream
                self._post(stream, requests[mine].tobytes(), tokens[mine].tobytes())
            for column in columns:
                column.clear()
        if self._ended or self._begun:
            for stream in {*self._ended, *self._begun}:
                self._post(stream, b"", b"")

    def _post(self, stream: int, requests: bytes, tokens: bytes) -> None:
        """Send new tokens, in the columns of StepTokens, and all else that is new."""
        send = self._listeners.get(stream, self._channel.post)
        if stream in self._logprobs or stream in self._prompts:
            self._post_early(stream, send)
        send(
            StepTokens(
                stream,
                requests,
                tokens,
                tuple(self._ended.pop(stream, ())),
                tuple(self._begun.pop(stream, ())),
                tuple(self._logprobs.pop(stream, ())),
                tuple(self._prompts.pop(stream, ())),
                tuple(self._predicted.pop(stream, ())),
            )
        )

    def _post_early(self, stream: int, send: Callable[[StepTokens], None]) -> None:
        """Send log probabilities before the tokens, as long as they are too much for one message:
        those with hidden states.
        """
        prompts, tokens = self._prompts.get(stream, []), self._logprobs.get(stream, [])
        num_bytes = sum(each.num_bytes for _, each in (*prompts, *tokens))
        while num_bytes > MAX_LOGPROB_BYTES:
            first = tuple((prompts or tokens)[:1])
            if prompts:
                send(StepTokens(stream, b"", b"", prompt_logprobs=first))
            else:
                send(StepTokens(stream, b"", b"", logprobs=first))
            del (prompts or tokens)[0]
            num_bytes -= first[0][1].num_bytes
