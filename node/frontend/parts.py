"""The parts of a node's front that depend on its role, provided by the role's own program."""

import socket
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio

from common.config import NodeConfig
from common.errors import ServingError
from common.identity.guard import CallAuthenticator
from common.tracing.context import Tracer
from node.frontend.engine_link import EngineLink
from node.frontend.supervision import EngineSupervisor
from node.messages import EngineStats, HandoffSpan, PoolingDone, QuarantineStarted, StepTokens
from node.metrics import NodeMetrics, Role


@dataclass(frozen=True, slots=True)
class NodeFrontend:
    """The values from which a program makes its parts."""

    instance: int
    address: str
    engine: EngineLink
    metrics: NodeMetrics
    supervision: EngineSupervisor
    make_channel: Callable[[str], grpc.aio.Channel]  # to other nodes
    tracer: Tracer | None
    transfer_socket: socket.socket  # to the transfer thread; owned by the part that opens it


def _nothing(*_: object) -> None:
    """Ignore a notice, for parts that do not use it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleServices:
    """The parts of one role. The callables run on the event loop and do not block."""

    # Each registers itself with the given guard and returns its names.
    services: Sequence[Callable[[grpc.aio.Server, CallAuthenticator | None], tuple[str, ...]]]
    background: Sequence[Callable[[], Coroutine[Any, Any, None]]] = ()  # until cancelled
    step: Callable[[StepTokens], None] = _nothing
    on_trial: Callable[[QuarantineStarted], None] = _nothing
    moved: Callable[[EngineStats], None] = _nothing
    handoff: Callable[[HandoffSpan], None] = _nothing
    pooled: Callable[[PoolingDone], None] = _nothing
    # The address of a node; raises FailedPrecondition if it cannot.
    pair_with: Callable[[str], None] = _nothing
    drain: Callable[[], None] = _nothing  # accept no new work from now on
    resume: Callable[[], None] = _nothing  # accept new work again
    end: Callable[[ServingError], None] = _nothing  # end every stream with this error


@dataclass(frozen=True, slots=True)
class RoleProgram:
    """A node in one role.

    Attributes:
        mode: shown by Describe.
        parts: called each time the node enters the role.
    """

    role: Role
    config: NodeConfig
    parts: Callable[[NodeFrontend], RoleServices]
    mode: str = ""
