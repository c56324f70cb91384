"""The requests that this node is responsible for, from their Submit to their one end.

Knows who is live on which router stream, what a request keeps in memory, when what happened to it,
and what its router is told. Knows nothing of where it waits, nor of pages.
"""

import time
from collections.abc import Iterator

from common.engine.rows.held_tokens import HeldTokens
from common.engine.rows.request import Finish, FinishReason, Request
from common.errors import QueueTooLong, ServingError
from common.node.messages import Ended
from common.node.outbox import Outbox
from common.node.stamps import RequestStamps
from common.requests.logprobs import Logprobs
from decode_node.counts import DecodeCounts


class LiveRequests:
    """Engine thread only.

    Args:
        most_tokens: of all requests together.
    """

    def __init__(self, outbox: Outbox, counts: DecodeCounts, most_tokens: int) -> None:
        self._outbox = outbox
        self._counts = counts
        self._by_origin: dict[tuple[int, int], Request] = {}
        self._tokens = HeldTokens(most_tokens)
        self._stamps: dict[int, RequestStamps] = {}  # by request key

    def __len__(self) -> int:
        return len(self._by_origin)

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._by_origin.values()))

    def get(self, origin: tuple[int, int]) -> Request | None:
        return self._by_origin.get(origin)

    def stamps(self, request: Request) -> RequestStamps:
        """Of one that has begun and not ended."""
        return self._stamps[request.key]

    def begin(self, request: Request, stamps: RequestStamps) -> None:
        """`end` or `refuse` follows, once."""
        self._stamps[request.key] = stamps

    def let_in(self, request: Request, *, times: int) -> None:
        """Raises Overloaded where there is no room for its tokens in `times` as much as there may
        be."""
        self._tokens.take(request.key, len(request.token_ids), times=times)
        self._by_origin[request.origin] = request

    def goes_on(self, request: Request) -> None:
        """With another record, which has the tokens that came since."""
        self._by_origin[request.origin] = request

    def tell_first_token(
        self,
        request: Request,
        token: int,
        logprobs: Logprobs | None,
        prompt_logprobs: Logprobs | None,
    ) -> None:
        self._outbox.begin(request.origin, request.cached_tokens)
        self._outbox.token(request.origin, token)
        if logprobs is not None:
            self._outbox.logprobs(request.origin, logprobs)
        if prompt_logprobs is not None:
            self._outbox.prompt_logprobs(request.origin, prompt_logprobs)

    def end(self, request: Request, finish: Finish) -> None:
        """The one way out of those that were let in."""
        self._by_origin.pop(request.origin, None)
        self._tell_end(request, finish)

    def refuse(self, request: Request, error: ServingError) -> None:
        """Never begun here, or not to be continued: the router hears why."""
        self._counts.refused(error)
        if self._by_origin.get(request.origin) is request:
            del self._by_origin[request.origin]
        retry_after_s = error.retry_after_s if isinstance(error, QueueTooLong) else 0.0
        finish = Finish(FinishReason.ERROR, str(error), error.status, retry_after_s)
        self._tell_end(request, finish)

    def _tell_end(self, request: Request, finish: Finish) -> None:
        self._tokens.drop(request.key)
        stamps = self._stamps.pop(request.key)
        stamps.admitted, stamps.away = request.admitted, request.away
        stamps.ended = time.monotonic()
        stream, number = request.origin
        code, _ = finish.status.value
        reason = int(finish.reason)
        ended = Ended(number, reason, finish.error, code, stamps, finish.retry_after_s)
        self._outbox.end(stream, ended)
