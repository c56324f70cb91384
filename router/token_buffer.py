"""Buffers on the two sides of a decode node's stream: output for clients, messages to the node.

The node's stream fills a request's TokenBuffer, and the client's writer empties it. All waiting
tokens go into one message, so a slow client gets fewer, larger messages instead of a longer queue.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, TypeVar

import msgspec

from common.errors import (
    REQUEST_ERRORS,
    EngineFault,
    NodeUnavailable,
    Overloaded,
    QueueFull,
    RequestAborted,
    ServingError,
)
from common.limits import MAX_CANCELS, MAX_SUBMITS, MAX_TOKENS, VERSION
from common.request import NOT_PREDICTED, PredictionUsage
from common.requests.logprobs import TokenLogprobs
from common.requests.namespace import BYTES_PER_TOKEN, UNNAMED, WeightsId
from protos import decode_pb2
from protos.decode_pb2 import Peers, Submit, ToNode

T = TypeVar("T")


class StreamEnd(msgspec.Struct, frozen=True):
    """Normal end of a request at its node."""

    finish_reason: str  # "stop" | "length"


class ModelVersion(msgspec.Struct, frozen=True):
    """Version of the weights and settings with which a node computes tokens.

    Attributes:
        fingerprint: hash of the weights and of all settings that affect tokens. "": not reported.
        batch_invariant: the request, its seed and the fingerprint determine the bits of a token.
    """

    weights: WeightsId = UNNAMED
    fingerprint: str = ""
    batch_invariant: bool = False

    @property
    def system_fingerprint(self) -> str | None:
        """OpenAI's system_fingerprint. None: not reported."""
        prefix = "fp_invariant_" if self.batch_invariant else "fp_"
        return f"{prefix}{self.fingerprint}" if self.fingerprint else None

    @property
    def invariant_fingerprint(self) -> str:
        """Fingerprint that another node must have to continue the response. "": any."""
        return self.fingerprint if self.batch_invariant else ""


UNKNOWN_VERSION = ModelVersion()


class NodeOutput(msgspec.Struct, frozen=True):
    """Output of a decode node for one request.

    Attributes:
        end: None: the request runs.
        cached_tokens: number of cached prompt tokens. None: not reported yet.
        prompt_logprobs: log-probabilities of the prompt from the first requested token on.
        version: version of all tokens.
    """

    token_ids: Sequence[int]
    end: StreamEnd | None = None
    cached_tokens: int | None = None
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    predicted: PredictionUsage = NOT_PREDICTED
    version: ModelVersion = UNKNOWN_VERSION


class TokenBuffer:
    """Tokens of one request between its node's stream and its client's writer.

    Bounded by the request's max_tokens: a node that sends more violates the protocol.
    """

    def __init__(
        self,
        max_tokens: int,  # number of tokens that the node may send
        *,
        wants_logprobs: bool = False,  # each token comes with log-probabilities
        version: ModelVersion = UNKNOWN_VERSION,  # version of appended tokens, until `renew`
    ) -> None:
        self.cached_tokens: int | None = None  # cached prompt tokens, from the node's first report
        # From the first requested prompt token on, sent with the first generated token.
        self.prompt_logprobs: Sequence[TokenLogprobs] = ()
        self.predicted = NOT_PREDICTED  # predicted tokens since the last output
        self._wants_logprobs = wants_logprobs
        self._logprobs: list[TokenLogprobs] = []  # for waiting tokens, and for tokens about to come
        self._room = max_tokens
        self._tokens: list[int] = []
        self._version = version
        # Earlier versions of waiting tokens, each with the remaining room after its last token.
        self._earlier: deque[tuple[ModelVersion, int]] = deque()
        self._end: StreamEnd | ServingError | None = None
        # Set while the writer waits: its `take` callback, and the future that it waits for.
        self._writer: tuple[Callable[[NodeOutput], Any], asyncio.Future[Any]] | None = None
        self._news: asyncio.Future[None] | None = None

    def append(self, token: int) -> bool:
        """Append a token. Returns False, and keeps nothing, if the node violates the protocol.

        That is a token beyond max_tokens, or a token without requested log-probabilities.
        """
        if not self._room or (self._wants_logprobs and len(self._logprobs) <= len(self._tokens)):
            return False
        self._room -= 1
        self._tokens.append(token)
        return True

    def renew(self, version: ModelVersion) -> None:
        """Set the version of the tokens that are appended next."""
        counted = self._earlier[-1][1] if self._earlier else self._room + len(self._tokens)
        if counted > self._room:
            self._earlier.append((self._version, self._room))
        self._version = version

    def note_cached_tokens(self, cached_tokens: int) -> None:
        """Keep only the first report: a retry counts KV from the first try as cached."""
        if self.cached_tokens is None:
            self.cached_tokens = cached_tokens

    def add_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Add the log-probabilities of the tokens that are appended next."""
        if self._wants_logprobs:
            self._logprobs += logprobs[: self._room]

    def end(self, end: StreamEnd | ServingError) -> None:
        """Record the end. Only the first one counts."""
        if self._end is None:
            self._end = end

    def wake(self) -> None:
        """Give new tokens and the end to a waiting writer. Called after every step."""
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
        if self._writer is None:
            return
        take, taken = self._writer
        if taken.done():
            return  # it is about to wake up
        try:
            result = self._next(take)
        except Exception as error:  # noqa: BLE001  raised again in the writer
            taken.set_exception(error)
        else:
            if result is not None:
                taken.set_result(result)

    @property
    def has_begun(self) -> bool:
        """True if there are tokens that the writer has not consumed."""
        return bool(self._tokens)

    def error(self) -> ServingError:
        """Return the error of a request that ended without a token."""
        end = self._end
        return end if isinstance(end, ServingError) else NodeUnavailable("it ended without a token")

    async def news(self) -> None:
        """Wait until there are tokens or an end. Consumes nothing."""
        if not self._tokens and self._end is None:
            self._news = asyncio.get_running_loop().create_future()
            await self._news

    async def consume(self, take: Callable[[NodeOutput], T | None]) -> T:
        """Call `take` with waiting output until it returns a result.

        `take` is called immediately and at each change. It returns None to wait for more, but must
        return a result with the end. After that, do not call this again. Only one writer may use
        this. `take` runs on the stream's side, so that the writer wakes up only for results.

        Raises:
            ServingError: the request failed, and all its tokens have been consumed.
        """
        result = self._next(take)
        if result is not None:
            return result
        taken: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._writer = take, taken
        try:
            return await taken
        finally:
            self._writer = None

    def _next(self, take: Callable[[NodeOutput], T | None]) -> T | None:
        while self._earlier:
            version, room = self._earlier.popleft()
            result = take(self._output(len(self._tokens) + self._room - room, version))
            if result is not None:
                return result
        end = self._end
        if self._tokens or isinstance(end, StreamEnd):
            stream_end = end if isinstance(end, StreamEnd) else None
            result = take(self._output(len(self._tokens), self._version, stream_end))
            if result is not None:
                return result
        if isinstance(end, ServingError):
            raise end
        return None

    def _output(
        self, num_tokens: int, version: ModelVersion, end: StreamEnd | None = None
    ) -> NodeOutput:
        """Take the first waiting tokens, which have this version."""
        tokens, self._tokens = self._tokens[:num_tokens], self._tokens[num_tokens:]
        logprobs: Sequence[TokenLogprobs] = ()
        if self._wants_logprobs:
            logprobs = self._logprobs[:num_tokens]
            self._logprobs = self._logprobs[num_tokens:]
        predicted, self.predicted = self.predicted, NOT_PREDICTED
        return NodeOutput(
            tokens, end, self.cached_tokens, logprobs, self.prompt_logprobs, predicted, version
        )


class OutgoingBatch:
    """Unsent messages to a decode node. For one event loop.

    A write costs the same for any size, so everything that arrives during a write is sent in one
    message. Bounded by the active requests: at most one entry for each, and one number for each
    cancelled one.
    """

    def __init__(self, address: str = "") -> None:
        self._address = address
        self._peers: Peers | None = None
        self._submits: dict[int, Submit] = {}
        self._cancels: list[int] = []
        self._version = VERSION  # protocol version; 0 once it is sent
        self._news = asyncio.Event()

    def clear(self) -> None:
        """Drop everything, because the stream is lost. The next stream starts with the version."""
        self._version = VERSION
        self._peers = None
        self._submits.clear()
        self._cancels.clear()

    def set_peers(self, prefill: Sequence[str], decode: Sequence[str] = ()) -> None:
        self._peers = Peers(
            prefill_addresses=prefill, decode_addresses=decode, own_address=self._address
        )
        self._news.set()

    def submit(self, submit: Submit) -> None:
        self._submits[submit.number] = submit
        self._news.set()

    def cancel(self, number: int) -> bool:
        """Cancel a request. Returns False, and sends nothing, if its submission is still unsent."""
        if self._submits.pop(number, None) is not None:
            return False
        self._cancels.append(number)
        self._news.set()
        return True

    async def message(self) -> ToNode:
        """Wait for something to send, and return as much of it as one message can hold.

        The lists of nodes come first, then the submissions in their order.
        """
        while self._peers is None and not self._submits and not self._cancels:
            self._news.clear()
            await self._news.wait()
        message = ToNode(
            peers=self._peers,
            submits=self._some_submits(),
            cancels=self._cancels[:MAX_CANCELS],
            protocol_version=self._version,
        )
        self._peers = None
        del self._cancels[:MAX_CANCELS]
        self._version = 0
        return message

    def _some_submits(self) -> list[Submit]:
        """Return submissions for one message, at least one if any is waiting."""
        taken: list[Submit] = []
        num_tokens = 0
        for submit in self._submits.values():
            num_tokens += submit.request.ByteSize() // BYTES_PER_TOKEN
            if taken and (num_tokens > MAX_TOKENS or len(taken) == MAX_SUBMITS):
                break
            taken.append(submit)
        for submit in taken:
            del self._submits[submit.number]
        return taken


_MAX_ERROR = 1000  # longest error message of a node, in characters
_LONGEST_RETRY_S = 3600.0


class LossCause(Enum):
    """Suspicion that a request caused the loss of its node."""

    UNRELATED = 0
    UNKNOWN = 1  # the node is lost without a reported reason
    POSSIBLE = 2  # the engine crashed
    CERTAIN = 3  # the engine crashed while it computed only this request


class NodeLost(NodeUnavailable):
    """The node of a request is lost, or rejected the request because it is about to stop."""

    def __init__(self, sentence: str, cause: LossCause) -> None:
        super().__init__(sentence)
        self.cause = cause


def may_have_crashed(error: NodeUnavailable) -> bool:
    """Return whether the request may have crashed the engine of its node."""
    return isinstance(error, NodeLost) and error.cause in (LossCause.POSSIBLE, LossCause.CERTAIN)


def end_of(
    reason: int, error: str, error_code: int, retry_after_s: float = 0.0
) -> StreamEnd | ServingError:
    """Return the result for one ended request in a Step message."""
    match reason:
        case decode_pb2.FINISH_REASON_STOP:
            return StreamEnd("stop")
        case decode_pb2.FINISH_REASON_LENGTH:
            return StreamEnd("length")
        case decode_pb2.FINISH_REASON_ABORT:
            return RequestAborted(error[:_MAX_ERROR] or "the request was aborted")
        case decode_pb2.FINISH_REASON_MOVED:
            return NodeLost("the request was moved to another decode node", LossCause.UNRELATED)
        case _:
            failure = REQUEST_ERRORS.get(error_code, EngineFault)
            sentence = error[:_MAX_ERROR] or "the decode node gave up without a reason"
            if failure is Overloaded and 0.0 < retry_after_s <= _LONGEST_RETRY_S:
                return QueueFull(sentence, retry_after_s)
            return failure(sentence)
