"""The requests that this node is responsible for, from their Submit to their one end.

Knows who is live on which router stream, what a request keeps in memory, when what happened to it,
and what its router is told. Knows nothing of where it waits, nor of pages.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from common.errors import InvalidRequest, ServingError
from common.requests.logprobs import Logprobs, join, split
from common.requests.prefix_hint import PrefixAt
from common.requests.request_trace import Flight, Flights
from decode_node.counts import DecodeCounts
from engine.adapters.adapters import Adapters
from engine.batch.request import Finish, FinishReason, Request
from engine.batch.token_budget import HeldTokens
from node.control.outbox import Outbox
from node.messages import Ended
from node.request_history import FlightRecorder
from node.request_traces import of_request
from node.timings import RequestStamps

# Log-probabilities are kept of so many of a request's last steps, for who goes on with it.
KEPT_LOGPROBS = 1024


class LiveRequests:
    """Engine thread only.

    Args:
        most_tokens: of all requests together.
    """

    def __init__(
        self, outbox: Outbox, counts: DecodeCounts, adapters: Adapters, most_tokens: int
    ) -> None:
        self._outbox = outbox
        self._counts = counts
        self._adapters = adapters
        self._by_origin: dict[tuple[int, int], Request] = {}
        self._tokens = HeldTokens(most_tokens)
        self._stamps: dict[int, RequestStamps] = {}  # by request key
        self._recorder = FlightRecorder(RequestStamps)
        self._tickets: dict[int, tuple[int, int]] = {}  # origins, by ticket
        self._ticket_of: dict[int, int] = {}  # by request key
        self._logprobs: dict[tuple[int, int], deque[Logprobs]] = {}  # by origin
        self._prefix_at: dict[int, tuple[PrefixAt, ...]] = {}  # by request key

    def __len__(self) -> int:
        return len(self._by_origin)

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._by_origin.values()))

    def get(self, origin: tuple[int, int]) -> Request | None:
        return self._by_origin.get(origin)

    def by_ticket(self, ticket: int) -> Request | None:
        """The request whose submission has it."""
        origin = self._tickets.get(ticket)
        return self._by_origin.get(origin) if origin is not None else None

    def stamps(self, request: Request) -> RequestStamps:
        """Of one that has begun and not ended."""
        return self._stamps[request.key]

    def begin(self, request: Request, stamps: RequestStamps) -> None:
        """`end` or `refuse` follows, once."""
        self._stamps[request.key] = stamps

    def prefix_at(self, request: Request) -> tuple[PrefixAt, ...]:
        """Who holds some of it, as far as its router knows."""
        return self._prefix_at.get(request.key, ())

    def let_in(
        self,
        request: Request,
        *,
        times: int,
        ticket: int = 0,
        prefix_at: tuple[PrefixAt, ...] = (),
    ) -> None:
        """
        Args:
            ticket: names this submission to whoever is to go on with it; 0: nobody is.
            prefix_at: who holds some of it.
        Raises:
            InvalidRequest: another one has that ticket.
            Overloaded: there is no room for its tokens in `times` as much as there may be.
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
        """With another record, which has the tokens that came since."""
        self._by_origin[request.origin] = request

    def report_cached_tokens(self, request: Request) -> None:
        """The router keeps the first report of a request."""
        self._outbox.begin(request.origin, request.cached_tokens)

    def tell_first_token(
        self,
        request: Request,
        token: int,
        logprobs: Logprobs | None,
        prompt_logprobs: Logprobs | None,
    ) -> None:
        self._outbox.begin(request.origin, request.cached_tokens)
        self.tell_tokens(request, (token,), logprobs)
        if prompt_logprobs is not None:
            self._outbox.prompt_logprobs(request.origin, prompt_logprobs)

    def tell_tokens(
        self, request: Request, tokens: Sequence[int], logprobs: Logprobs | None
    ) -> None:
        """logprobs: of these tokens, where they are told."""
        for token in tokens:
            self._outbox.token(request.origin, token)
        if logprobs is not None:
            self.tell_logprobs(request.origin, logprobs)

    def tell_logprobs(self, origin: tuple[int, int], logprobs: Logprobs) -> None:
        """Of tokens that are told in the same step."""
        self._outbox.logprobs(origin, logprobs)
        if origin in self._by_origin:
            self._logprobs.setdefault(origin, deque(maxlen=KEPT_LOGPROBS)).append(logprobs)

    def told_logprobs(self, request: Request, num_tokens: int) -> Logprobs | None:
        """Of its last tokens, so many; None: not that many are known any more."""
        told = [each for part in self._logprobs.get(request.origin, ()) for each in split(part)]
        return join(told[-num_tokens:]) if len(told) >= num_tokens > 0 else None

    def end(self, request: Request, finish: Finish) -> None:
        """The one way out of those that were let in."""
        self._by_origin.pop(request.origin, None)
        self._tell_end(request, finish)

    def refuse(self, request: Request, error: ServingError) -> None:
        """Never begun here, or not to be continued: the router hears why."""
        self._counts.refused(error)
        if self._by_origin.get(request.origin) is request:
            del self._by_origin[request.origin]
        finish = Finish(FinishReason.ERROR, str(error), error.status, error.late_s)
        self._tell_end(request, finish)

    def explain(self, request_id: str) -> Flights:
        """What happened here to those of that id, under way and ended."""
        found = [*self._recorder.find(request_id), *self._under_way(request_id)]
        now = time.monotonic()
        return Flights(tuple(of_request(each, now) for each in found), len(self._recorder))

    def flights(self, num_ended: int) -> list[tuple[str, Flight]]:
        """Ids and flights of the last that have ended, and of all under way."""
        found = [*self._recorder.last(num_ended), *self._under_way()]
        now = time.monotonic()
        return [(stamps.request_id, of_request(stamps, now)) for stamps in found]

    def _under_way(self, request_id: str | None = None) -> Iterable[RequestStamps]:
        """Of that id; None: of any."""
        for request in self:
            if request_id in (None, request.spec.request_id):
                stamps = self._stamps[request.key]
                _complete(stamps, request)
                yield stamps

    def _tell_end(self, request: Request, finish: Finish) -> None:
        self._tokens.drop(request.key)
        self._prefix_at.pop(request.key, None)
        self._adapters.release(request.key)
        self._tickets.pop(self._ticket_of.pop(request.key, 0), None)
        if request.origin not in self._by_origin:  # else another has that number
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
        ended = Ended(number, reason, finish.error, code, stamps, finish.retry_after_s)
        self._outbox.end(stream, ended)


def _complete(stamps: RequestStamps, request: Request) -> None:
    """With what the scheduler notes in the request itself."""
    stamps.admitted, stamps.away = request.admitted, request.away
    stamps.cached_tokens, stamps.bringing = request.cached_tokens, request.bringing
