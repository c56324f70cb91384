"""Requests that this node is responsible for, from Submit to their one end.

This module tracks which requests are live on each router stream, what each keeps in memory, its
timings, and what its router is sent. It knows nothing about queues or pages.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from common.errors import InvalidRequest, ServingError
from common.requests.logprobs import Logprobs, join, split
from common.requests.prefix_hint import PrefixHint
from common.requests.request_trace import RequestTrace, RequestTraces
from decode_node.counts import DecodeCounters
from engine.adapters.adapters import AdapterManager
from engine.batch.request import FinishReason, Request, RequestEnd
from engine.batch.token_budget import TokenBudget
from node.control.outbox import TokenOutbox
from node.messages import RequestEnded
from node.request_history import RequestHistory
from node.request_traces import of_request
from node.timings import RequestTimings

# Log-probabilities of this many last steps of a request are kept for a node that continues it.
KEPT_LOGPROBS = 1024


class ActiveRequests:
    """Active requests of the decode node. Engine thread only.

    Args:
        most_tokens: limit for all requests together.
    """

    def __init__(
        self,
        outbox: TokenOutbox,
        counts: DecodeCounters,
        adapters: AdapterManager,
        most_tokens: int,
    ) -> None:
        self._outbox = outbox
        self._counts = counts
        self._adapters = adapters
        self._by_origin: dict[tuple[int, int], Request] = {}
        self._tokens = TokenBudget(most_tokens)
        self._stamps: dict[int, RequestTimings] = {}  # by request key
        self._recorder = RequestHistory(RequestTimings)
        self._tickets: dict[int, tuple[int, int]] = {}  # origins, by ticket
        self._ticket_of: dict[int, int] = {}  # by request key
        self._logprobs: dict[tuple[int, int], deque[Logprobs]] = {}  # by origin
        self._prefix_at: dict[int, tuple[PrefixHint, ...]] = {}  # by request key

    def __len__(self) -> int:
        return len(self._by_origin)

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._by_origin.values()))

    def get(self, origin: tuple[int, int]) -> Request | None:
        return self._by_origin.get(origin)

    def by_ticket(self, ticket: int) -> Request | None:
        """Return the request whose submission has this ticket."""
        origin = self._tickets.get(ticket)
        return self._by_origin.get(origin) if origin is not None else None

    def stamps(self, request: Request) -> RequestTimings:
        """Return the timings of a request that has begun and not ended."""
        return self._stamps[request.key]

    def begin(self, request: Request, stamps: RequestTimings) -> None:
        """Start tracking a request. Exactly one `end` or `refuse` must follow."""
        self._stamps[request.key] = stamps

    def prefix_at(self, request: Request) -> tuple[PrefixHint, ...]:
        """Return the nodes that hold part of the prompt, as far as the router knows."""
        return self._prefix_at.get(request.key, ())

    def let_in(
        self,
        request: Request,
        *,
        times: int,
        ticket: int = 0,
        prefix_at: tuple[PrefixHint, ...] = (),
    ) -> None:
        """Admit a request.

        Args:
            times: multiple of the token limit up to which this request is admitted.
            ticket: names this submission for a node that continues it. 0: it will not be continued.
            prefix_at: nodes that hold part of the prompt.
        Raises:
            InvalidRequest: another request has that ticket.
            Overloaded: the tokens would exceed `times` the token limit.
        """
        if ticket in self._tickets:
            raise InvalidRequest("ticket: another request has it")
        num_tokens = len(request.token_ids) + request.spec.num_predicted
        self._tokens.take(request.key, num_tokens, times=times)
        self._by_origin[request.origin] = request
        if prefix_at:
            self._prefix_at[request.key] = prefix_at
        if ticket:
            self._tickets[ticket] = request.origin
            self._ticket_of[request.key] = ticket

    def goes_on(self, request: Request) -> None:
        """Replace the record of a request by one that includes the tokens generated since."""
        self._by_origin[request.origin] = request

    def report_cached_tokens(self, request: Request) -> None:
        """Report the cached tokens. The router keeps the first report of a request."""
        self._outbox.begin(request.origin, request.cached_tokens)

    def send_first_token(
        self,
        request: Request,
        token: int,
        logprobs: Logprobs | None,
        prompt_logprobs: Logprobs | None,
    ) -> None:
        self._outbox.begin(request.origin, request.cached_tokens)
        self.send_tokens(request, (token,), logprobs)
        if prompt_logprobs is not None:
            self._outbox.prompt_logprobs(request.origin, prompt_logprobs)

    def send_tokens(
        self, request: Request, tokens: Sequence[int], logprobs: Logprobs | None
    ) -> None:
        """Send tokens, with their log-probabilities if there are any."""
        for token in tokens:
            self._outbox.token(request.origin, token)
        if logprobs is not None:
            self.tell_logprobs(request.origin, logprobs)

    def tell_logprobs(self, origin: tuple[int, int], logprobs: Logprobs) -> None:
        """Send the log-probabilities of tokens that are sent in the same step."""
        self._outbox.logprobs(origin, logprobs)
        if origin in self._by_origin:
            self._logprobs.setdefault(origin, deque(maxlen=KEPT_LOGPROBS)).append(logprobs)

    def sent_logprobs(self, request: Request, num_tokens: int) -> Logprobs | None:
        """Return the log-probabilities of the last tokens, or None if not all are kept."""
        told = [each for part in self._logprobs.get(request.origin, ()) for each in split(part)]
        return join(told[-num_tokens:]) if len(told) >= num_tokens > 0 else None

    def end(self, request: Request, finish: RequestEnd) -> None:
        """End an admitted request. This is the only way that it ends."""
        self._by_origin.pop(request.origin, None)
        self._tell_end(request, finish)

    def refuse(self, request: Request, error: ServingError) -> None:
        """Reject or end a request and report the error to the router."""
        self._counts.refused(error)
        if self._by_origin.get(request.origin) is request:
            del self._by_origin[request.origin]
        finish = RequestEnd(FinishReason.ERROR, str(error), error.status, error.late_s)
        self._tell_end(request, finish)

    def explain(self, request_id: str) -> RequestTraces:
        """Return the traces of the requests with this id, active and ended."""
        found = [*self._recorder.find(request_id), *self._under_way(request_id)]
        now = time.monotonic()
        return RequestTraces(tuple(of_request(each, now) for each in found), len(self._recorder))

    def flights(self, num_ended: int) -> list[tuple[str, RequestTrace]]:
        """Return ids and traces of the last ended requests and of all active ones."""
        found = [*self._recorder.last(num_ended), *self._under_way()]
        now = time.monotonic()
        return [(stamps.request_id, of_request(stamps, now)) for stamps in found]

    def _under_way(self, request_id: str | None = None) -> Iterable[RequestTimings]:
        """Yield the timings of active requests with this id (None: of all)."""
        for request in self:
            if request_id in (None, request.spec.request_id):
                stamps = self._stamps[request.key]
                _complete(stamps, request)
                yield stamps

    def _tell_end(self, request: Request, finish: RequestEnd) -> None:
        self._tokens.drop(request.key)
        self._prefix_at.pop(request.key, None)
        self._adapters.release(request.key)
        self._tickets.pop(self._ticket_of.pop(request.key, 0), None)
        if request.origin not in self._by_origin:  # otherwise another request has that number
            self._logprobs.pop(request.origin, None)
        stamps = self._stamps.pop(request.key)
        _complete(stamps, request)
        stamps.ended = time.monotonic()
        reason_name = finish.reason.name.lower()
        stamps.end = f"{reason_name}: {finish.error}" if finish.error else reason_name
        failed = finish.reason is FinishReason.ERROR or stamps.had_trouble
        self._recorder.record(stamps, failed=failed)
        stream, number = request.origin
        code, _ = finish.status.value
        reason = int(finish.reason)
        ended = RequestEnded(number, reason, finish.error, code, stamps, finish.retry_after_s)
        self._outbox.end(stream, ended)


def _complete(stamps: RequestTimings, request: Request) -> None:
    """Copy the times that the scheduler keeps in the request itself."""
    stamps.admitted, stamps.away = request.admitted, request.away
    stamps.cached_tokens, stamps.bringing = request.cached_tokens, request.bringing
