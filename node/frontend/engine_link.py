"""The server process's connection to its engine thread, the engine's health, and the interface of a
role's services.

EngineLink sends one-way messages, and calls with deadlines. It knows neither gRPC streams nor the
meaning of responses.
"""

import asyncio
import hashlib
import itertools
import socket
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio
import msgspec

from common.config import NodeConfig
from common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidRequest,
    NodeUnavailable,
    Overloaded,
    ServingError,
)
from common.identity.guard import CallAuthenticator
from common.process.ipc import CallLane, FrameConnection
from common.tracing.context import Tracer
from node.messages import (
    Command,
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
from node.metrics import NodeMetrics, Role

# Above this many unread bytes, new work is rejected. The rest of the backlog is for cancels.
_MAX_UNREAD_BYTES = 16 << 20
_MAX_QUESTIONS = 64  # calls in progress


class EngineLink:
    """The frontend's end of the engine's socket. Event loop only.

    Attributes:
        on_notice: called with every message except responses, in order. Must not block. Each role
            sets its own before the engine can send anything in that role.
    Args:
        on_end: called once when the engine has closed its end or no longer reads.
    """

    on_notice: Callable[[EngineMessage], None]

    def __init__(self, on_end: Callable[[str], None]) -> None:
        self._on_end = on_end
        self._connection: FrameConnection[EngineMessage] = FrameConnection(
            EngineMessage, self._take, self._end
        )
        self._numbers = itertools.count(1)
        self._questions: dict[int, asyncio.Future[NodeCallResult]] = {}
        # Done when another role has begun.
        self._restarted: asyncio.Future[EngineReady] | None = None
        self._ready = False
        self._ended = False

    async def open(self, sock: socket.socket, start: StartRole) -> None:
        """Take over the socket and send the first message."""
        await self._connection.open(sock)
        self._connection.send(start)

    async def restart(self, start: StartRole) -> EngineReady:
        """Start another role. Returns when it has begun: later messages belong to it, and earlier
        ones to the previous role. Never returns without an engine.
        """
        self._ready = False
        self._restarted = asyncio.get_running_loop().create_future()
        self.send(start)
        return await self._restarted

    def check_ready(self) -> None:
        """Raise NodeUnavailable until the engine has loaded its model, and after its end."""
        if self._ended:
            raise NodeUnavailable("the engine of the node has ended")
        if not self._ready:
            raise NodeUnavailable("the node is starting")

    def lane(self) -> CallLane:
        return CallLane(self._connection)

    def send(self, message: FrontMessage, lane: CallLane | None = None) -> None:
        """Send a message that must not be lost. It is dropped if the engine has ended, because it
        would have no effect. If the engine does not read, the link ends, because the node cannot
        work without it.
        """
        (lane or self._connection).send(message)

    def submit(self, request: SubmitRequest | SubmitPooling, lane: CallLane) -> None:
        """Send new work.

        Raises:
            NodeUnavailable: the engine is not ready, or has ended.
            Overloaded: it is behind on reading.
        """
        self.check_ready()
        if self._connection.backlog_bytes > _MAX_UNREAD_BYTES:
            raise Overloaded("the engine of the node does not keep up with new requests")
        self.send(request, lane)

    async def ask(self, command: Command, *, timeout_s: float = 5.0) -> NodeCallResult:
        """Call the engine thread, which responds between two steps.

        Raises:
            NodeUnavailable: the engine is not ready, or ended before it responded.
            Overloaded: too many calls are in progress.
            DeadlineExceeded: the engine is in a step that takes longer.
            FailedPrecondition: the engine responded with this error.
        """
        self.check_ready()
        if len(self._questions) >= _MAX_QUESTIONS:
            raise Overloaded("too many calls are waiting for the engine of the node")
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
        """Close the socket, which releases the engine, without `on_end`. Idempotent."""
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
                    self.on_notice(message)
                elif not self._restarted.done():
                    self._restarted.set_result(message)
            case _:
                self.on_notice(message)

    def _end(self, reason: str) -> None:
        self._ended = True
        self._refuse_questions()
        self._on_end(reason)

    def _refuse_questions(self) -> None:
        for question in self._questions.values():
            if not question.done():
                question.set_exception(NodeUnavailable("the engine of the node has ended"))


SILENCE_S = 3.0
ARITHMETIC = "arithmetic"  # fingerprint field of nodes with engine.batch_invariant
SERVES = ("ready", "paused")  # states in which requests are accepted, even if they only wait


class EngineSupervisor:
    """The health of a node, derived from its engine's heartbeats and reports, for health probes and
    routers. Has no sockets, processes or clock.

        "starting" -> "ready" <-> "paused"; both <-> "unhealthy"; any -> "draining"

    Heartbeats continue during a long step. A heartbeat or a report means that the engine makes
    progress.

    Attributes:
        moving: the engine's last report, or None.
    """

    def __init__(self, silence_s: float = SILENCE_S) -> None:
        self._silence_s = silence_s
        self._moved_at = 0.0
        self.moving: EngineStats | None = None
        self.ready: EngineReady | None = None
        self.draining = False

    @property
    def fingerprint(self) -> str:
        """Hash of everything that determines the tokens of a response. Empty before `started`."""
        if self.ready is None:
            return ""
        weights = {"weights": self.moving.weights.hex()} if self.moving is not None else {}
        fields = {**self.ready.fingerprint, **weights}
        return hashlib.sha256(msgspec.json.encode(sorted(fields.items()))).hexdigest()[:16]

    @property
    def batch_invariant(self) -> bool:
        """Return whether responses have the same bits whatever runs in the same batch."""
        return self.ready is not None and ARITHMETIC in self.ready.fingerprint

    def started(self, ready: EngineReady, now: float) -> None:
        self.ready = ready
        self._moved_at = now

    def check_length(self, num_tokens: int, field: str = "token_ids") -> None:
        """Raise InvalidRequest, as the engine's own check does, if this many tokens can never be
        served. Called by the frontend before it reads the tokens. No effect before `started`.
        """
        if self.ready is not None and num_tokens >= self.ready.context_length:
            raise InvalidRequest(
                f"{field}: {num_tokens} tokens leave no room in a context of "
                f"{self.ready.context_length}"
            )

    def moved(self, moving: EngineStats, now: float) -> None:
        self.moving = moving
        self._moved_at = now

    def heartbeat(self, now: float, late_s: float) -> None:
        """Record a heartbeat of an engine that is late by `late_s` seconds."""
        self._moved_at = max(self._moved_at, now - late_s)

    def moves(self, now: float) -> bool:
        """Return whether the engine has made progress recently."""
        return now - self._moved_at < self._silence_s

    def liveness(self, now: float) -> tuple[str, float]:
        """Return the state, and the seconds since the engine's last progress (0: no report yet)."""
        return self.state(now), now - self._moved_at if self.moving else 0.0

    def state(self, now: float) -> str:
        if self.draining:
            return "draining"
        if self.ready is None:
            return "starting"
        if not self.moves(now):
            return "unhealthy"
        return "paused" if self.moving and self.moving.state == "paused" else "ready"


@dataclass(frozen=True, slots=True)
class NodeFrontend:
    """The parts of a frontend with which a role creates its services."""

    instance: int
    address: str
    engine: EngineLink
    metrics: NodeMetrics
    supervision: EngineSupervisor
    make_channel: Callable[[str], grpc.aio.Channel]  # opens a channel to another node
    tracer: Tracer | None
    transfer_socket: socket.socket  # to the transfer thread. Owned by the service that opens it


def _nothing(*_: object) -> None:
    """Ignore a message, for services that do not need it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleServices:
    """The services of one role. The callables run on the event loop and do not block."""

    # Each adds itself to the server with the given guard, and returns its names.
    services: Sequence[Callable[[grpc.aio.Server, CallAuthenticator | None], tuple[str, ...]]]
    background: Sequence[Callable[[], Coroutine[Any, Any, None]]] = ()  # run until cancelled
    step: Callable[[StepTokens], None] = _nothing
    on_quarantine: Callable[[QuarantineStarted], None] = _nothing
    moved: Callable[[EngineStats], None] = _nothing
    handoff: Callable[[HandoffSpan], None] = _nothing
    pooled: Callable[[PoolingDone], None] = _nothing
    # Takes the address of a node. Raises FailedPrecondition if it cannot pair.
    pair_with: Callable[[str], None] = _nothing
    drain: Callable[[], None] = _nothing  # accept no new work from now on
    resume: Callable[[], None] = _nothing  # accept new work again
    end: Callable[[ServingError], None] = _nothing  # end every stream with this error


@dataclass(frozen=True, slots=True)
class RoleProgram:
    """One role of a node: its configuration and services.

    Attributes:
        mode: shown by Describe.
        parts: creates the services, each time the node enters the role.
    """

    role: Role
    config: NodeConfig
    parts: Callable[[NodeFrontend], RoleServices]
    mode: str = ""
