"""Liveness of a decode node, and what the end of a request or of a node means for the client."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

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
from common.process.standstill import StallMonitor
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
    POSSIBLE = 2  # the engine crashed
    CERTAIN = 3  # the engine crashed while it computed only this request


class NodeLost(NodeUnavailable):
    """The node of a request is gone, or refused it because it is about to end."""

    def __init__(self, sentence: str, cause: LossCause) -> None:
        super().__init__(sentence)
        self.cause = cause


def may_have_crashed(error: NodeUnavailable) -> bool:
    """Return whether the request may have crashed the engine of its node."""
    return isinstance(error, NodeLost) and error.cause in (LossCause.POSSIBLE, LossCause.CERTAIN)


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


_LONGEST_LOOK_S = 0.5


# Liveness of a decode node's engine, by the heartbeats on its Serve stream.
#
# A responsive node process proves nothing: its engine may be stalled, and a node that finishes
# nothing looks like the least busy one. So there are two limits of silence: after the first, the
# node gets no new requests. After the second, its requests are given up.
@dataclass(frozen=True, slots=True)
class LivenessLimits:
    """Limits for a silent engine, in seconds. Heartbeats come once a second."""

    silent_s: float = 5.0  # until the engine counts as silent
    dead_s: float = 10.0  # until it counts as dead


class EngineLiveness:
    """Liveness of the engine behind one stream, from its opening on. For one event loop.

    It counts as silent until the first heartbeat: a node may be stalled when a stream opens.
    """

    def __init__(self, patience: LivenessLimits, on_change: Callable[[], None]) -> None:
        """Start as silent.

        Args:
            patience: limits of silence.
            on_change: called when `moves` or `dead` has changed.
        """
        self.moves = False
        self.dead = False
        self._patience = patience
        self._on_change = on_change
        self._look_s = min(_LONGEST_LOOK_S, patience.silent_s / 4)
        self._standstill = StallMonitor(self._look_s)

    def heartbeat(self, late_s: float = 0.0) -> None:
        """Note a heartbeat.

        Args:
            late_s: seconds by which the engine's progress is overdue: its silence began then.
        """
        late_s = late_s if late_s > 0.0 else 0.0  # NaN counts as 0
        self._standstill.moved(late_s)
        if late_s < self._patience.silent_s:
            self._report(moves=True)

    async def until_dead(self) -> None:
        """Wait until the engine counts as dead. Returns at once while it stays dead."""
        while (silence_s := self._standstill.look()) < self._patience.dead_s:
            if silence_s >= self._patience.silent_s:
                self._report(moves=False)
            await asyncio.sleep(self._look_s)
        self._report(moves=False, dead=True)

    def _report(self, *, moves: bool, dead: bool = False) -> None:
        if (moves, dead) != (self.moves, self.dead):
            self.moves, self.dead = moves, dead
            self._on_change()


@dataclass(frozen=True, slots=True)
class MigrationOutcome:
    """Result of a migration.

    `target` is "" if there was no node to migrate to. `because` is the reason why the request
    stays, or empty after success.
    """

    target: str
    because: str = ""


class MigratableRequest(Protocol):
    """A request that can be migrated. For one event loop."""

    @property
    def request_id(self) -> str: ...

    @property
    def address(self) -> str:
        """Address of its node."""
        ...

    @property
    def movable(self) -> bool:
        """True if `migrate` may be called: the request has a token and no migration in progress."""
        ...

    def migrate(self, target: str = "") -> "asyncio.Task[MigrationOutcome]":
        """Start to migrate it to `target`, or to any decode node.

        The task ends when the request has migrated or stays. It is cancelled if the request ends.
        """
        ...
