"""What is told about one request to metrics and the log, from its arrival to its end."""

import asyncio
import logging
import time
from types import TracebackType

from common.errors import InvalidRequest, Overloaded, RequestAborted, ServingError
from common.logs import kv
from common.metrics import RouterMetrics

log = logging.getLogger(__name__)


class RequestRecord:
    """A context around one request: leaving it is the request's end."""

    def __init__(self, metrics: RouterMetrics, request_id: str) -> None:
        self._metrics = metrics
        self._request_id = request_id
        self._arrived_at = time.monotonic()
        self._wrote_at = self._arrived_at
        self._accepted = False
        self._num_tokens = 0
        self._finish_reason = "error"

    def __enter__(self) -> "RequestRecord":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._accepted:
            self._refuse(error)
            return
        outcome = _outcome(error) if error else self._finish_reason
        self._metrics.ended(outcome)
        fields = {
            "request_id": self._request_id,
            "outcome": outcome,
            "tokens": self._num_tokens,
            "seconds": time.monotonic() - self._arrived_at,
        }
        if isinstance(error, ServingError):
            fields["error"] = error
        log.info("request ended %s", kv(**fields))

    def accept(self, num_prompt_tokens: int, decode: str) -> None:
        """The request is about to be submitted to a decode node."""
        self._accepted = True
        self._metrics.accepted()
        log.debug(
            "request accepted %s",
            kv(request_id=self._request_id, prompt_tokens=num_prompt_tokens, decode=decode),
        )

    def write(self, num_tokens: int) -> None:
        """A message with so many tokens goes to the client now."""
        now = time.monotonic()
        self._metrics.tokens(num_tokens)
        num_next = num_tokens
        if num_tokens and not self._num_tokens:
            self._metrics.first_token(now - self._arrived_at)
            num_next -= 1
        for _ in range(num_next):
            self._metrics.next_token((now - self._wrote_at) / num_tokens)
        self._wrote_at = now
        self._num_tokens += num_tokens

    def finish(self, finish_reason: str) -> None:
        """finish_reason: "stop" or "length"."""
        self._finish_reason = finish_reason

    def _refuse(self, error: BaseException | None) -> None:
        match error:
            case InvalidRequest():
                self._metrics.rejected("invalid")
            case Overloaded():
                self._metrics.rejected("overloaded")
            case ServingError():
                self._metrics.rejected("no_node")
            case _:
                return
        log.info("request refused %s", kv(request_id=self._request_id, reason=error))


def _outcome(error: BaseException) -> str:
    match error:
        case asyncio.CancelledError() | RequestAborted():
            return "cancelled"
        case _:
            return "error"
