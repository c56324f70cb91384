"""Every error that Baton reports to someone else.

ServingError                      status sent to the peer
├── InvalidRequest                INVALID_ARGUMENT     the caller's fault, never retried
├── Unauthenticated               UNAUTHENTICATED      the caller has not proved who it is
├── Forbidden                     PERMISSION_DENIED    it has, and may not call this
├── WrongState                    FAILED_PRECONDITION  not as things stand
├── NotKnown                      NOT_FOUND            nothing is known by that name
├── Overloaded                    RESOURCE_EXHAUSTED   retry later or on another node
│   ├── QueueTooLong                                   the same, and when: what waits takes too long
│   └── RateLimited                                    retry later: the client's own limit
├── RequestAborted                CANCELLED
├── DeadlineExceeded              DEADLINE_EXCEEDED
├── NodeUnavailable               UNAVAILABLE          retry on another node
│   └── AdapterNotLoaded                               the same: this one has not the adapter
├── TransferError                 UNAVAILABLE          retry the attempt
│   ├── LayoutMismatch            FAILED_PRECONDITION  misconfigured pair, never retried
│   └── ProtocolViolation         FAILED_PRECONDITION  ends the pair stream
├── EngineDied                    ABORTED              retry on another node, see quarantine.py
├── RequestFailed                 INTERNAL             it cannot be computed, never retried
├── ConfigError                   FAILED_PRECONDITION  one line and exit code 2
└── EngineFault                   UNAVAILABLE          the node fails its requests and exits
"""

from typing import ClassVar

from grpc import StatusCode

# Of a sentence that says what someone else has sent: as gRPC writes it, in a trailer of at most
# 8 KiB, a character can take 12 bytes.
MAX_SENTENCE_CHARACTERS = 600


def cut(sentence: str) -> str:
    """A sentence that is not too long for logs and clients."""
    if len(sentence) <= MAX_SENTENCE_CHARACTERS:
        return sentence
    return f"{sentence[: MAX_SENTENCE_CHARACTERS - 1]}…"


class ServingError(Exception):
    """An error with a status and a sentence for whoever asked.

    Attributes:
        late_s: above 0.0: what waits takes too long, for so much longer.
    """

    status: ClassVar[StatusCode]
    late_s: float = 0.0

    def __str__(self) -> str:
        return cut(super().__str__())


class InvalidRequest(ServingError):
    status = StatusCode.INVALID_ARGUMENT


class Unauthenticated(ServingError):
    status = StatusCode.UNAUTHENTICATED


class Forbidden(ServingError):
    status = StatusCode.PERMISSION_DENIED


class WrongState(ServingError):
    status = StatusCode.FAILED_PRECONDITION


class NotKnown(ServingError):
    status = StatusCode.NOT_FOUND


class Overloaded(ServingError):
    """
    Attributes:
        retry_after_s: until the same request would not be refused, as far as is known.
    """

    status = StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, sentence: str, retry_after_s: float = 1.0) -> None:
        super().__init__(sentence)
        self.retry_after_s = retry_after_s


class QueueTooLong(Overloaded):
    """What waits already takes longer than the request may wait. Nothing was done about it."""

    def __init__(self, sentence: str, retry_after_s: float) -> None:
        super().__init__(sentence, retry_after_s)
        self.late_s = retry_after_s


class RateLimited(Overloaded):
    """A limit of the client's own."""


class RequestAborted(ServingError):
    status = StatusCode.CANCELLED


class DeadlineExceeded(ServingError):
    status = StatusCode.DEADLINE_EXCEEDED


class NodeUnavailable(ServingError):
    status = StatusCode.UNAVAILABLE


class AdapterNotLoaded(NodeUnavailable):
    """Nor will it have it by itself."""


class TransferError(ServingError):
    status = StatusCode.UNAVAILABLE


class LayoutMismatch(TransferError):
    status = StatusCode.FAILED_PRECONDITION


class ProtocolViolation(TransferError):
    status = StatusCode.FAILED_PRECONDITION


class ConfigError(ServingError):
    status = StatusCode.FAILED_PRECONDITION

    def __str__(self) -> str:
        return Exception.__str__(self)  # what the operator has written, told to nobody else


class EngineDied(ServingError):
    """Told to those who had requests at a node by its front, which outlives its engine."""

    status = StatusCode.ABORTED


class RequestFailed(ServingError):
    status = StatusCode.INTERNAL


class EngineFault(ServingError):
    status = StatusCode.UNAVAILABLE
