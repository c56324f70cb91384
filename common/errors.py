"""All errors that Baton reports to clients or other processes.

ServingError                      status sent to the peer
├── InvalidRequest                INVALID_ARGUMENT     the caller's fault, never retried
├── Unauthenticated               UNAUTHENTICATED      the caller is not authenticated
├── Forbidden                     PERMISSION_DENIED    the caller may not call this
├── FailedPrecondition            FAILED_PRECONDITION  not possible in the current state
├── NotFound                      NOT_FOUND            the name is unknown
├── Overloaded                    RESOURCE_EXHAUSTED   retry later or on another node
│   ├── QueueFull                                      the queue is too long; says when to retry
│   └── RateLimited                                    retry later: the client's own limit
├── RequestAborted                CANCELLED
├── DeadlineExceeded              DEADLINE_EXCEEDED
├── NodeUnavailable               UNAVAILABLE          retry on another node
│   └── AdapterNotLoaded                               the node has not loaded the adapter
├── TransferError                 UNAVAILABLE          retry the attempt
│   ├── LayoutMismatch            FAILED_PRECONDITION  misconfigured pair, never retried
│   └── ProtocolViolation         FAILED_PRECONDITION  ends the pair stream
├── EngineDied                    ABORTED              retry on another node (request.py)
├── RequestFailed                 INTERNAL             it cannot be computed, never retried
├── ConfigError                   FAILED_PRECONDITION  one line and exit code 2
└── EngineFault                   UNAVAILABLE          the node fails its requests and exits
    └── RankLost                                       another rank of the node is lost
"""

from typing import ClassVar

from grpc import StatusCode

# Limit of messages that include text from others. gRPC encodes a character in up to 12 bytes, in a
# trailer of at most 8 KiB.
MAX_SENTENCE_CHARACTERS = 600


def cut(sentence: str) -> str:
    """Return the sentence, shortened for logs and clients."""
    if len(sentence) <= MAX_SENTENCE_CHARACTERS:
        return sentence
    return f"{sentence[: MAX_SENTENCE_CHARACTERS - 1]}…"


class ServingError(Exception):
    """An error with a status and a message for the caller.

    Attributes:
        late_s: if above 0.0, seconds by which the queue is too long.
    """

    status: ClassVar[StatusCode]
    late_s: float = 0.0

    def __str__(self) -> str:
        return cut(super().__str__())


class InvalidRequest(ServingError):
    status = StatusCode.INVALID_ARGUMENT


def check_at_most(field: str, number: int, units: str, limit: int) -> None:
    """Raise InvalidRequest if a field has more units than allowed."""
    if number > limit:
        raise InvalidRequest(f"{field} has {number} {units}, {limit} allowed")


class Unauthenticated(ServingError):
    status = StatusCode.UNAUTHENTICATED


class Forbidden(ServingError):
    status = StatusCode.PERMISSION_DENIED


class FailedPrecondition(ServingError):
    status = StatusCode.FAILED_PRECONDITION


class NotFound(ServingError):
    status = StatusCode.NOT_FOUND


class Overloaded(ServingError):
    """The receiver is overloaded, or a limit was reached.

    Attributes:
        retry_after_s: expected seconds until the same request would be accepted.
    """

    status = StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, sentence: str, retry_after_s: float = 1.0) -> None:
        super().__init__(sentence)
        self.retry_after_s = retry_after_s


class QueueFull(Overloaded):
    """The queue takes longer than the request may wait. No work was done for it."""

    def __init__(self, sentence: str, retry_after_s: float) -> None:
        super().__init__(sentence, retry_after_s)
        self.late_s = retry_after_s


class RateLimited(Overloaded):
    """The client has reached its own limit."""


class RequestAborted(ServingError):
    status = StatusCode.CANCELLED


class DeadlineExceeded(ServingError):
    status = StatusCode.DEADLINE_EXCEEDED


class NodeUnavailable(ServingError):
    status = StatusCode.UNAVAILABLE


class AdapterNotLoaded(NodeUnavailable):
    """The node has not loaded the adapter and will not load it on its own."""


class TransferError(ServingError):
    status = StatusCode.UNAVAILABLE


class LayoutMismatch(TransferError):
    status = StatusCode.FAILED_PRECONDITION


class ProtocolViolation(TransferError):
    status = StatusCode.FAILED_PRECONDITION


class ConfigError(ServingError):
    status = StatusCode.FAILED_PRECONDITION

    def __str__(self) -> str:
        return Exception.__str__(self)  # in full: only the operator, who wrote the value, sees it


class EngineDied(ServingError):
    """The engine of a node crashed. Sent by the server process, which outlives its engine."""

    status = StatusCode.ABORTED


class RequestFailed(ServingError):
    status = StatusCode.INTERNAL


class EngineFault(ServingError):
    status = StatusCode.UNAVAILABLE


class RankLost(EngineFault):
    """Another rank of this node has ended or does not respond in time."""


# Errors of a request that a node may report, by their gRPC status code. A receiver replaces errors
# with other codes.
REQUEST_ERRORS: dict[int, type[ServingError]] = {
    error.status.value[0]: error
    for error in (
        InvalidRequest,
        Overloaded,
        RequestAborted,
        DeadlineExceeded,
        NodeUnavailable,
        RequestFailed,
    )
}
