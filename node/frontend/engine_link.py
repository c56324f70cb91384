"""The front's conversation with its engine thread: one-way messages, questions with deadlines.

Knows what crosses (messages.py) and nothing of gRPC streams or of what the answers mean.
"""

import asyncio
import itertools
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from common.errors import DeadlineExceeded, NodeUnavailable, Overloaded, WrongState
from common.process.ipc import Backlogged, FrameConnection, PeerGone
from common.process.lanes import Lane
from node.messages import (
    Answer,
    Ask,
    CacheChanged,
    Drained,
    EngineFailed,
    EngineMessage,
    EngineReady,
    FrontMessage,
    HandoffTraced,
    Moving,
    OnTrial,
    Pooled,
    PoolPrompts,
    Start,
    StepTokens,
    SubmitRequest,
)

# Beyond this much unread, new work is refused; the rest of the backlog is for cancels.
_MAX_UNREAD_BYTES = 16 << 20
_MAX_QUESTIONS = 64  # waiting for their answers

Notice: TypeAlias = (
    EngineReady
    | StepTokens
    | OnTrial
    | HandoffTraced
    | Pooled
    | Moving
    | CacheChanged
    | Drained
    | EngineFailed
)


class EngineLink:
    """Event loop only.

    Args:
        on_notice: called with everything but answers, in order; must not block.
        on_end: called once when the engine has closed its end, or does not read any more.
    """

    def __init__(self, on_notice: Callable[[Notice], None], on_end: Callable[[str], None]) -> None:
        self._on_notice = on_notice
        self._on_end = on_end
        self._connection: FrameConnection[EngineMessage] = FrameConnection(
            EngineMessage, self._take, self._end
        )
        self._numbers = itertools.count(1)
        self._questions: dict[int, asyncio.Future[Answer]] = {}
        self._restarted: asyncio.Future[EngineReady] | None = None  # once another role begins
        self._ready = False
        self._ended = False

    async def open(self, sock: socket.socket, start: Start) -> None:
        """Takes the socket over and sends the first frame."""
        await self._connection.open(sock)
        self._connection.send(start)

    async def restart(self, start: Start) -> EngineReady:
        """Another role begins. Returns when it has: what the engine says from then on is of it,
        and all notices before were of the one before. Without an engine it never returns."""
        self._ready = False
        self._restarted = asyncio.get_running_loop().create_future()
        self.send(start)
        return await self._restarted

    def check_ready(self) -> None:
        """Raises NodeUnavailable until the engine has loaded its model, and after its end."""
        if self._ended:
            raise NodeUnavailable("the engine of this node has ended")
        if not self._ready:
            raise NodeUnavailable("this node is starting")

    def lane(self) -> Lane:
        """For the messages of one stream."""
        return Lane(self._connection)

    def send(self, message: FrontMessage, lane: Lane | None = None) -> None:
        """Sends what must not be lost. Without an engine it has no meaning any more: dropped.

        Args:
            lane: of the stream that caused it.
        """
        if self._ended:
            return
        with self._ends():
            (lane or self._connection).send(message)

    async def room(self, lane: Lane) -> None:
        """Waits until more may be taken of the stream whose lane this is."""
        with self._ends():
            await lane.room()

    def submit(self, request: SubmitRequest | PoolPrompts, lane: Lane) -> None:
        """Sends new work.

        Raises:
            NodeUnavailable: the engine is not there.
            Overloaded: it does not keep up with reading.
        """
        self.check_ready()
        if self._connection.backlog_bytes > _MAX_UNREAD_BYTES:
            raise Overloaded("the engine of this node does not keep up with new requests")
        self.send(request, lane)

    async def ask(self, what: str, argument: str = "", *, timeout_s: float = 5.0) -> Answer:
        """Asks the engine thread, which answers between two steps.

        Raises:
            NodeUnavailable: the engine is not there, or ended before it answered.
            Overloaded: too many questions wait already.
            DeadlineExceeded: it is in a step that takes longer.
            WrongState: what it answered instead.
        """
        self.check_ready()
        if len(self._questions) >= _MAX_QUESTIONS:
            raise Overloaded("too many questions wait for the engine of this node")
        number = next(self._numbers)
        self._questions[number] = asyncio.get_running_loop().create_future()
        try:
            self.send(Ask(number, what, argument))
            answer = await asyncio.wait_for(self._questions[number], timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(f"the engine has not answered within {timeout_s:g} s") from None
        finally:
            del self._questions[number]
        if answer.error:
            raise WrongState(answer.error)
        return answer

    def close(self) -> None:
        """Lets the engine go: it sees end of file. Idempotent; `on_end` is not called any more."""
        self._ended = True
        self._connection.close()
        self._refuse_questions()

    def _take(self, message: EngineMessage) -> None:
        match message:
            case Answer(number=number):
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
        """Without an engine that reads the node is of no use."""
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
