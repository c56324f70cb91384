"""Translation of the end of a request at its node to the client's result."""

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
from router.losses import LossCause, NodeLost
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
            return NodeLost("the request was moved to another decode node", LossCause.NOT_ITS_OWN)
        case _:
            failure = _ERRORS.get(error_code, EngineFault)
            sentence = error[:_MAX_ERROR] or "the decode node gave up without a reason"
            if failure is Overloaded and 0.0 < retry_after_s <= _LONGEST_RETRY_S:
                return QueueFull(sentence, retry_after_s)
            return failure(sentence)
