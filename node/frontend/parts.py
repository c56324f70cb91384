"""What makes a node prefill or decode, as its front takes it from the role's own program."""

import socket
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio

from common.config import NodeConfig
from common.errors import ServingError
from common.identity.guard import Guard
from common.tracing.tracer import Tracer
from node.frontend.engine_link import EngineLink
from node.frontend.supervision import Supervision
from node.messages import HandoffTraced, Moving, OnTrial, Pooled, StepTokens
from node.metrics import NodeMetrics, Role


@dataclass(frozen=True, slots=True)
class Front:
    """What a program makes its parts of."""

    instance: int
    address: str
    engine: EngineLink
    metrics: NodeMetrics
    supervision: Supervision
    make_channel: Callable[[str], grpc.aio.Channel]  # to other nodes
    tracer: Tracer | None
    transfer_socket: socket.socket  # to the transfer thread; whoever opens it owns it


def _nothing(*_: object) -> None:
    """For parts that have no use for a notice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeParts:
    """The callables run on the event loop, and return."""

    # Register themselves with the guard that they are given, and return their names.
    services: Sequence[Callable[[grpc.aio.Server, Guard | None], tuple[str, ...]]]
    background: Sequence[Callable[[], Coroutine[Any, Any, None]]] = ()  # until cancelled
    step: Callable[[StepTokens], None] = _nothing
    on_trial: Callable[[OnTrial], None] = _nothing
    moved: Callable[[Moving], None] = _nothing
    handoff: Callable[[HandoffTraced], None] = _nothing
    pooled: Callable[[Pooled], None] = _nothing
    pair_with: Callable[[str], None] = _nothing  # a node there; raises WrongState: it cannot
    drain: Callable[[], None] = _nothing  # take no new work from now on
    resume: Callable[[], None] = _nothing  # take it again
    end: Callable[[ServingError], None] = _nothing  # end every stream with this error


@dataclass(frozen=True, slots=True)
class RoleProgram:
    """A node in one role.

    Attributes:
        mode: shown by Describe.
        parts: made anew whenever the node takes the role.
    """

    role: Role
    config: NodeConfig
    parts: Callable[[Front], NodeParts]
    mode: str = ""
