"""The requests that this node is responsible for, from Submit to their end, and the messages to
routers about them.

All tokens and ends of a step go to each router stream in one message. This module knows nothing
about queues or pages.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import msgspec
import numpy as np
from grpc import StatusCode
from numpy.typing import NDArray

from common.distribution import HANDOFF_S, HistogramCounts, LiveHistogram
from common.errors import AdapterNotLoaded, InvalidRequest, QueueFull, ServingError
from common.request import PredictionUsage
from common.requests.logprobs import Logprobs, join, split
from common.requests.timeline import RequestTrace, RequestTraces
from decode_node.state import DecodeState
from engine.batch.limits import TokenBudget
from engine.batch.request import FinishReason, Request
from kvtransfer.messages import SampledOutput
from node.control.engine_control import FrontendChannel
from node.messages import RequestEnded, StepTokens
from node.request_state import Claim, Ending, as_request_end
from node.timings import RequestHistory, RequestTimings

_NAMES = (
    *("handoffs_opened", "handoffs_completed", "handoffs_failed", "handoff_retries", "pages_read"),
    *("handoff_tokens/local_cache", "handoff_tokens/producer_cache", "handoff_tokens/computed"),
    *("link_changes/up", "link_changes/down"),
    *("refused/invalid", "refused/draining", "refused/overloaded", "refused/deadline"),
    *("refused/late", "refused/dropped", "refused/adapter"),
    *("moves/away", "moves/refused", "moves/here"),
    *("canaries/passed", "canaries/failed", "canaries/unknown"),
)
_LOCAL = tuple(
    f"local_prefills/{why}" for why in ("colocated", "short", "no_prefill_node", "exhausted")
)
_REFUSALS = {
    StatusCode.INVALID_ARGUMENT: "invalid",
    StatusCode.DEADLINE_EXCEEDED: "deadline",
    StatusCode.UNAVAILABLE: "draining",
}
_REASONS: Mapping[type[ServingError], str] = {QueueFull: "late", AdapterNotLoaded: "adapter"}


MAX_LOGPROB_BYTES = 4 << 20  # per message or request. gRPC and frames have higher limits


class _StreamOutput(msgspec.Struct, eq=False):
    """The results for one router stream that are not sent yet. See StepTokens."""

    requests: bytearray = msgspec.field(default_factory=bytearray)
    tokens: bytearray = msgspec.field(default_factory=bytearray)
    ended: list[RequestEnded] = msgspec.field(default_factory=list)
    begun: list[tuple[int, int]] = msgspec.field(default_factory=list)
    logprobs: list[tuple[int, Logprobs]] = msgspec.field(default_factory=list)
    prompt_logprobs: list[tuple[int, Logprobs]] = msgspec.field(default_factory=list)
    predicted: list[tuple[int, PredictionUsage]] = msgspec.field(default_factory=list)


class TokenOutbox:
    """Collects the results of a step for each router stream. Engine thread only.

    Nothing is sent before `flush`. The tokens of a request are sent in the order in which they were
    added, and before its end.
    """

    def __init__(self, channel: FrontendChannel) -> None:
        self._channel = channel
        self._outputs: defaultdict[int, _StreamOutput] = defaultdict(_StreamOutput)
        self._listeners: dict[int, Callable[[StepTokens], None]] = {}

    def listen(self, stream: int, take: Callable[[StepTokens], None]) -> None:
        """Deliver the messages of this stream to `take`, inside the engine."""
        self._listeners[stream] = take

    def tokens(
        self, streams: NDArray[np.uint64], requests: NDArray[np.uint64], tokens: NDArray[np.int32]
    ) -> None:
        """Add new tokens as columns, one entry per token."""
        for stream in set(streams.tolist()):
            mine, output = streams == stream, self._outputs[stream]
            output.requests += requests[mine].tobytes()
            output.tokens += tokens[mine].tobytes()

    def token(self, origin: tuple[int, int], token: int) -> None:
        stream, request = origin
        output = self._outputs[stream]
        output.requests += request.to_bytes(8, "little")
        output.tokens += token.to_bytes(4, "little")

    def logprobs(self, origin: tuple[int, int], logprobs: Logprobs) -> None:
        """Add log-probabilities for tokens of this request that are added before `flush`."""
        stream, request = origin
        self._outputs[stream].logprobs.append((request, logprobs))

    def prompt_logprobs(self, origin: tuple[int, int], logprobs: Logprobs) -> None:
        """Add the log-probabilities of a prompt, together with the first token."""
        stream, request = origin
        self._outputs[stream].prompt_logprobs.append((request, logprobs))

    def predicted(self, origin: tuple[int, int], predicted: PredictionUsage) -> None:
        stream, request = origin
        self._outputs[stream].predicted.append((request, predicted))

    def begin(self, origin: tuple[int, int], cached_tokens: int) -> None:
        """Report a prompt's cached tokens, when its prefill starts and with its first token."""
        stream, request = origin
        self._outputs[stream].begun.append((request, cached_tokens))

    def end(self, stream: int, ended: RequestEnded) -> None:
        self._outputs[stream].ended.append(ended)

    def flush(self) -> None:
        for stream, output in tuple(self._outputs.items()):
            if output.requests or output.ended or output.begun:
                del self._outputs[stream]
                self._post(stream, output)

    def _post(self, stream: int, output: _StreamOutput) -> None:
        send = self._listeners.get(stream, self._channel.post)
        if output.logprobs or output.prompt_logprobs:
            _post_early(stream, output, send)
        send(
            StepTokens(
                stream,
                bytes(output.requests),
                bytes(output.tokens),
                tuple(output.ended),
                tuple(output.begun),
                tuple(output.logprobs),
                tuple(output.prompt_logprobs),
                tuple(output.predicted),
            )
        )


def _post_early(stream: int, output: _StreamOutput, send: Callable[[StepTokens], None]) -> None:
    """Send log-probabilities ahead of the tokens, as long as they exceed the limit of one message.
    Only hidden states are that large.
    """
    prompts, tokens = output.prompt_logprobs, output.logprobs
    num_bytes = sum(each.num_bytes for _, each in (*prompts, *tokens))
    while num_bytes > MAX_LOGPROB_BYTES:
        if prompts:
            first = prompts.pop(0)
            send(StepTokens(stream, b"", b"", prompt_logprobs=(first,)))
        else:
            first = tokens.pop(0)
            send(StepTokens(stream, b"", b"", logprobs=(first,)))
        num_bytes -= first[1].num_bytes


class DecodeCounters:
    """Counters of a decode node, named as in Node.Describe. After a slash, a name has a reason, a
    source or a change.
    """

    def __init__(self) -> None:
        self._totals = dict.fromkeys((*_NAMES, *_LOCAL), 0)
        self._seconds = LiveHistogram(HANDOFF_S)

    def count(self, name: str, number: int = 1) -> None:
        self._totals[name] += number

    def held(
        self, seconds: float, *, pages_read: int, tokens: int, own: int, producer_cached: int
    ) -> None:
        """Count a completed hand-off.

        Args:
            seconds: time since it was opened.
            own: prefix tokens cached on this node.
            producer_cached: prefix tokens cached on the producer.
        """
        totals = self._totals
        totals["handoffs_completed"] += 1
        totals["pages_read"] += pages_read
        totals["handoff_tokens/local_cache"] += own
        totals["handoff_tokens/producer_cache"] += max(producer_cached - own, 0)
        totals["handoff_tokens/computed"] += tokens - max(own, producer_cached)
        self._seconds.add(seconds)

    def refused(self, error: ServingError) -> None:
        reason = _REASONS.get(type(error)) or _REFUSALS.get(error.status, "overloaded")
        self._totals[f"refused/{reason}"] += 1

    def totals(self) -> dict[str, int]:
        return {**self._totals, "local_prefills": sum(self._totals[name] for name in _LOCAL)}

    def distributions(self) -> Mapping[str, HistogramCounts]:
        return {"handoff_seconds": self._seconds.counted()}


class ActiveRequests:
    """The active requests of the decode node. Engine thread only.

    Args:
        tokens: limit for all requests together.
    """

    def __init__(
        self,
        outbox: TokenOutbox,
        tokens: TokenBudget,
        history: RequestHistory[RequestTimings],
        counters: DecodeCounters,
    ) -> None:
        self.outbox = outbox
        self.counters = counters
        self._tokens = tokens
        self._history = history
        self._by_origin: dict[tuple[int, int], DecodeState] = {}
        self._by_ticket: dict[int, DecodeState] = {}

    def __len__(self) -> int:
        return len(self._by_origin)

    def __iter__(self) -> Iterator[DecodeState]:
        return iter(tuple(self._by_origin.values()))

    def get(self, origin: tuple[int, int]) -> DecodeState | None:
        return self._by_origin.get(origin)

    def find(self, request: Request) -> DecodeState | None:
        """Return the state of a request that has not ended."""
        return self._by_origin.get(request.origin)

    def by_ticket(self, ticket: int) -> DecodeState | None:
        return self._by_ticket.get(ticket)

    def add(self, state: DecodeState, *, times: int) -> None:
        """Admit a request. Its tokens and its ticket become claims.

        Args:
            times: multiple of the token limit that applies to this request.
        Raises:
            InvalidRequest: another request has its ticket.
            Overloaded: the token limit would be exceeded.
        """
        ticket = state.placement.ticket
        if ticket in self._by_ticket:
            raise InvalidRequest("ticket: another request already uses it")
        num_tokens = len(state.request.token_ids) + state.request.spec.num_predicted
        self._tokens.take(state.key, num_tokens, times=times)
        state.claims.add(Claim.TOKENS, partial(self._tokens.drop, state.key))
        self._by_origin[state.origin] = state
        if ticket:
            self._by_ticket[ticket] = state
            state.claims.add(Claim.TICKET, partial(self._by_ticket.pop, ticket))

    def report_cached_tokens(self, state: DecodeState) -> None:
        """Report the cached tokens. The router keeps only the first report."""
        self.outbox.begin(state.origin, state.request.cached_tokens)

    def send_first_token(self, state: DecodeState, output: SampledOutput) -> None:
        self.report_cached_tokens(state)
        self.send_tokens(state, (output.token,), output.logprobs)
        if output.prompt_logprobs is not None:
            self.outbox.prompt_logprobs(state.origin, output.prompt_logprobs)

    def send_tokens(
        self, state: DecodeState, tokens: Sequence[int], logprobs: Logprobs | None
    ) -> None:
        for token in tokens:
            self.outbox.token(state.origin, token)
        if logprobs is not None:
            self.send_logprobs(state.origin, logprobs)

    def send_logprobs(self, origin: tuple[int, int], logprobs: Logprobs) -> None:
        """Send the log-probabilities of tokens that are sent in the same step."""
        self.outbox.logprobs(origin, logprobs)
        state = self._by_origin.get(origin)
        if state is not None:
            state.logprobs.append(logprobs)

    def sent_logprobs(self, state: DecodeState, num_tokens: int) -> Logprobs | None:
        """Return the log-probabilities of the last tokens, or None if not all are kept."""
        sent = [each for part in state.logprobs for each in split(part)]
        return join(sent[-num_tokens:]) if len(sent) >= num_tokens > 0 else None

    def report_end(self, state: DecodeState, ending: Ending) -> None:
        """Report the end of a request to its router. Called by `RequestState.close`."""
        if isinstance(ending, ServingError):
            self.counters.refused(ending)
        else:
            # Only a request that waited too long in a queue has a retry delay.
            self.counters.count("refused/dropped", ending.retry_after_s > 0.0)
        if self._by_origin.get(state.origin) is state:  # a rejected request may be absent
            del self._by_origin[state.origin]
        end, timings = as_request_end(ending), state.timings
        _complete(state)
        timings.ended = time.monotonic()
        reason = end.reason.name.lower()
        timings.end = f"{reason}: {end.error}" if end.error else reason
        failed = end.reason is FinishReason.ERROR or timings.had_trouble
        self._history.record(timings, failed=failed)
        stream, number = state.origin
        code, _ = end.status.value
        ended = RequestEnded(number, int(end.reason), end.error, code, timings, end.retry_after_s)
        self.outbox.end(stream, ended)

    def explain(self, request_id: str) -> RequestTraces:
        return self._history.explain(request_id, self._active_timings())

    def flights(self, num_ended: int) -> list[tuple[str, RequestTrace]]:
        return self._history.flights(num_ended, self._active_timings())

    def _active_timings(self) -> Iterable[RequestTimings]:
        for state in self:
            _complete(state)
            yield state.timings


def _complete(state: DecodeState) -> None:
    """Copy the times that the scheduler records in the request."""
    request, timings = state.request, state.timings
    timings.admitted, timings.away = request.admitted, request.away
    timings.cached_tokens, timings.loads = request.cached_tokens, request.loads
    timings.encoded = request.encoded
