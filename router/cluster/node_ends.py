"""Translation of the end of a request at its node, or of the node, to the client's result."""

from enum import Enum

from common.errors import (
    DeadlineExceeded,
    EngineFault,
    InvalidRequest,
    NodeUnavailable,
    Overloaded,
    QueueFull,
    RequestAborted,
    RequestFailed,
    ServingError,
)
from protos import decode_pb2
from router.token_buffer import StreamEnd

# Other statuses of a node are reported to clients only as a failure of the node.
_ERRORS: dict[int, type[ServingError]] = {
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

_MAX_ERROR = 1000  # characters of a node's message
_LONGEST_RETRY_S = 3600.0


class LossCause(Enum):
    """Role of a request in the loss of its node."""

    UNRELATED = 0
    UNKNOWN = 1  # the node is gone and has given no reason
    SUSPECT = 2  # the engine crashed
    GUILTY = 3  # the engine crashed while it computed only this request


class NodeLost(NodeUnavailable):
    """The node of a request is gone, or refused it because it is about to end."""

    def __init__(self, sentence: str, cause: LossCause) -> None:
        super().__init__(sentence)
        self.cause = cause


def may_have_crashed(error: NodeUnavailable) -> bool:
    """Return whether the request may have crashed the engine of its node."""
    return isinstance(error, NodeLost) and error.cause in (LossCause.SUSPECT, LossCause.GUILTY)


def end_of(
    reason: int, error: str, error_code: int, retry_after_s: float = 0.0
) -> StreamEnd | ServingError:
    """Return the result for one row of a Step's columns about ended requests."""
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
            failure = _ERRORS.get(error_code, EngineFault)
            sentence = error[:_MAX_ERROR] or "the decode node gave up without a reason"
            if failure is Overloaded and 0.0 < retry_after_s <= _LONGEST_RETRY_S:
                return QueueFull(sentence, retry_after_s)
            return failure(sentence)
