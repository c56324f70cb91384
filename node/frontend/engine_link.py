"""The front's link to its engine thread: one-way messages, and questions with deadlines.

Knows the messages (messages.py), not gRPC streams or the meaning of answers.
"""

import asyncio
import itertools
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from common.errors import DeadlineExceeded, FailedPrecondition, NodeUnavailable, Overloaded
from common.process.ipc import Backlogged, CallLane, FrameConnection, PeerGone
from node.commands import Command
from node.messages import (
    CacheEventBatch,
    Drained,
    EngineFailed,
    EngineMessage,
    EngineReady,
    EngineStats,
    FrontMessage,
    HandoffSpan,
    NodeCall,
    NodeCallResult,
    PoolingDone,
    QuarantineStarted,
    StartRole,
    StepTokens,
    SubmitPooling,
    SubmitRequest,
)

# Beyond this much unread, new work is rejected. The rest of the backlog is for cancels.
_MAX_UNREAD_BYTES = 16 << 20
_MAX_QUESTIONS = 64  # waiting for their answers

Notice: TypeAlias = (
    EngineReady
    | StepTokens
    | QuarantineStarted
    | HandoffSpan
    | PoolingDone
    | EngineStats
    | CacheEventBatch
    | Drained
    | EngineFailed
)


class EngineLink:
    """The front's end of the engine's socket. Event loop only.

    Args:
        on_notice: called with everything but answers, in order. Must not block.
        on_end: called once when the engine has closed its end, or no longer reads.
    """

    def __init__(self, on_notice: Callable[[Notice], None], on_end: Callable[[str], None]) -> None:
        self._on_notice = on_notice
        self._on_end = on_end
        self._connection: FrameConnection[EngineMessage] = FrameConnection(
            EngineMessage, self._take, self._end
        )
        self._numbers = itertools.count(1)
        self._questions: dict[int, asyncio.Future[NodeCallResult]] = {}
        self._restarted: asyncio.Future[EngineReady] | None = None  # done when another role begins
        self._ready = False
        self._ended = False

    async def open(self, sock: socket.socket, start: StartRole) -> None:
        """Take over the socket and send the first frame."""
        await self._connection.open(sock)
        self._connection.send(start)

    async def restart(self, start: StartRole) -> EngineReady:
        """Start another role. Returns when it has begun: later notices belong to it, and all
        earlier ones to the previous role. Without an engine it never returns.
        """
        self._ready = False
        self._restarted = asyncio.get_running_loop().create_future()
        self.send(start)
        return await self._restarted

    def check_ready(self) -> None:
        """Raise NodeUnavailable until the engine has loaded its model, and after its end."""
        if self._ended:
            raise NodeUnavailable("the engine of this node has ended")
        if not self._ready:
            raise NodeUnavailable("this node is starting")

    def lane(self) -> CallLane:
        """Return a lane for the messages of one stream."""
        return CallLane(self._connection)

    def send(self, message: FrontMessage, lane: CallLane | None = None) -> None:
        """Send a message that must not be lost. It is dropped if the engine has ended, since it has
        no effect then.

        Args:
            lane: of the stream that caused it.
        """
        if self._ended:
            return
        with self._ends():
            (lane or self._connection).send(message)

    async def room(self, lane: CallLane) -> None:
        """Wait until more may be read from the stream of this lane."""
        with self._ends():
            await lane.room()

    def submit(self, request: SubmitRequest | SubmitPooling, lane: CallLane) -> None:
        """Send new work.

        Raises:
            NodeUnavailable: the engine is not there.
            Overloaded: it does not keep up with reading.
        """
        self.check_ready()
        if self._connection.backlog_bytes > _MAX_UNREAD_BYTES:
            raise Overloaded("the engine of this node does not keep up with new requests")
        self.send(request, lane)

    async def ask(self, command: Command, *, timeout_s: float = 5.0) -> NodeCallResult:
        """Ask the engine thread, which answers between two steps.

        Raises:
            NodeUnavailable: the engine is not there, or ended before it answered.
            Overloaded: too many questions wait already.
            DeadlineExceeded: it is in a step that takes longer.
            FailedPrecondition: the engine answered with this error.
        """
        self.check_ready()
        if len(self._questions) >= _MAX_QUESTIONS:
            raise Overloaded("too many questions wait for the engine of this node")
        number = next(self._numbers)
        self._questions[number] = asyncio.get_running_loop().create_future()
        try:
            self.send(NodeCall(number, command))
            answer = await asyncio.wait_for(self._questions[number], timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(f"the engine has not answered within {timeout_s:g} s") from None
        finally:
            del self._questions[number]
        if answer.error:
            raise FailedPrecondition(answer.error)
        return answer

    def close(self) -> None:
        """Release the engine: it sees end of file. Idempotent. `on_end` is not called any more."""
        self._ended = True
        self._connection.close()
        self._refuse_questions()

    def _take(self, message: EngineMessage) -> None:
        match message:
            case NodeCallResult(number=number):
                question = self._questions.get(number)
                if question is not None and not question.done():
                    question.set_result(message)
            case EngineReady():
                self._ready = True
                if self._restarted is None:
                    self._on_notice(message)
                elif not self._restarted.done():
                    self._restarted.set_result(message)
            case _:
                self._on_notice(message)

    @contextmanager
    def _ends(self) -> Iterator[None]:
        """End the link if the engine does not read: the node cannot work without it."""
        try:
            yield
        except PeerGone:
            pass
        except Backlogged as error:
            self._connection.close()
            self._end(str(error))

    def _end(self, reason: str) -> None:
        if self._ended:
            return
        self._ended = True
        self._refuse_questions()
        self._on_end(reason)

    def _refuse_questions(self) -> None:
        for question in self._questions.values():
            if not question.done():
                question.set_exception(NodeUnavailable("the engine of this node has ended"))
