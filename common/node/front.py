"""The front of a node: its gRPC server, its engine process, and the end of both.

What makes a node prefill or decode comes as NodeParts from the node's own program. The front
keeps no books: if either process dies, the other ends too.
"""

import asyncio
import logging
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc.aio
import uvloop

from common import logs, rpc, tls
from common.config import NodeConfig
from common.errors import ConfigError, EngineDied, EngineFault, NodeUnavailable, ServingError
from common.identity.caller import node_name
from common.identity.guard import Guard
from common.identity.program import guard_of, identity_of
from common.logs import kv
from common.metrics import NodeMetrics, Role, served
from common.node.cache_feed import CacheFeed
from common.node.ending import Ending, Verdict
from common.node.engine_link import EngineLink, Notice
from common.node.messages import (
    Ask,
    CacheChanged,
    Drained,
    EngineFailed,
    EngineReady,
    HandoffTraced,
    Moving,
    OnTrial,
    Pooled,
    Start,
    StepTokens,
)
from common.node.process import EngineProcess, exit_sentence
from common.node.service import NodeService
from common.node.supervision import SERVES, Supervision
from common.process import allocator, descriptors
from common.tracing import export
from common.tracing.tracer import Tracer
from protos import node_pb2_grpc

log = logging.getLogger(__name__)

_HEALTH_INTERVAL_S = 0.2
_LAST_WORDS_S = 1.0  # from the engine's end of file to its end
_STREAMS_S = 1.0  # for streams to take their error at the end
_ENGINE_END_S = 5.0  # for the engine to let go of its memory after a drain
_HASTY_END_S = 1.0  # the same when the node must be gone soon


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
    """What makes the node prefill or decode. The callables run on the event loop, and return."""

    # Register themselves with the guard that they are given, and return their names.
    services: Sequence[Callable[[grpc.aio.Server, Guard | None], tuple[str, ...]]]
    background: Sequence[Callable[[], Coroutine[Any, Any, None]]] = ()  # until cancelled
    step: Callable[[StepTokens], None] = _nothing
    on_trial: Callable[[OnTrial], None] = _nothing
    moved: Callable[[Moving], None] = _nothing
    handoff: Callable[[HandoffTraced], None] = _nothing
    pooled: Callable[[Pooled], None] = _nothing
    drain: Callable[[], None] = _nothing  # take no new work from now on
    end: Callable[[ServingError], None] = _nothing  # end every stream with this error


def run_node(
    config: NodeConfig,
    *,
    role: Role,
    engine_module: str,
    parts: Callable[[Front], NodeParts],
    mode: str = "",
) -> int:
    """Runs a node to its end and returns the exit code of its program.

    0: asked to end, and ended. 1: the engine, or this front, failed. 2: the configuration is
    wrong; one line on stderr says how.

    Args:
        engine_module: started as `python -m engine_module`; see engine_process.run_engine.
        mode: shown by Describe.
    """
    logs.setup(role, config.front.log_level, config.front.log_format)
    descriptors.allow_many()
    allocator.hold_little()

    async def run() -> int:
        return await _Node(config, role, mode, engine_module).run(parts)

    try:
        return uvloop.run(run())
    except ConfigError as error:
        print(f"baton {role}: {error}", file=sys.stderr)
        return 2


class _Node:
    def __init__(self, config: NodeConfig, role: Role, mode: str, engine_module: str) -> None:
        self._config = config
        self._role = role
        self._mode = mode
        self._engine_module = engine_module
        self._supervision = Supervision(config.silence_s)
        self._metrics = NodeMetrics(role)
        self._metrics.liveness_from(lambda: self._supervision.liveness(time.monotonic()))
        self._ending = Ending()
        self._engine_let_go = asyncio.Event()
        self._link = EngineLink(self._notice, lambda _: self._engine_let_go.set())
        self._cache_feed = CacheFeed(self._link)
        self._parts = NodeParts(services=())

    async def run(self, parts: Callable[[Front], NodeParts]) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._ending.signalled, number.name)
        front = self._config.front
        certificates = tls.certificates(front.tls, "--front.tls")
        instance = secrets.randbits(64)
        trust = self._metrics.trust
        identity = identity_of("node", node_name(instance), front.secret_file, trust.refused)
        guard = guard_of(front, identity, certificates, trust.refused)
        if certificates is not None:
            trust.certificate_ends("shown", partial(tls.shown_end, certificates))
            trust.certificate_ends("authority", partial(tls.authority_end, certificates))
        server = rpc.make_server(rpc.NODE_SERVER_OPTIONS)
        port = rpc.bind(server, front.host, front.port, certificates)
        with ExitStack() as stack:
            metrics_port = stack.enter_context(
                served(self._metrics.registry, front.host, front.metrics_port)
            )
            engine = EngineProcess(self._engine_module)
            stack.callback(engine.close)
            tracer = export.start(front, f"baton-{self._role}")
            if tracer is not None:
                stack.callback(tracer.close)
            start = Start(
                config=self._config.model_dump_json(),
                instance=instance,
                address=rpc.join_address(front.host, port),
            )
            self._parts = parts(
                Front(
                    instance=start.instance,
                    address=start.address,
                    engine=self._link,
                    metrics=self._metrics,
                    supervision=self._supervision,
                    make_channel=partial(
                        rpc.make_channel, certificates=certificates, identity=identity
                    ),
                    tracer=tracer,
                    transfer_socket=engine.transfer_socket,
                )
            )
            health = self._register(server, guard, start, engine)
            await health.tell(False)
            async with rpc.serving_health(health, front.host, front.health_port):
                await self._link.open(engine.engine_socket, start)
                await server.start()
                listening = {"address": start.address, "tls": tls.kind(certificates)}
                listening["secret"] = "off" if identity is None else "on"
                log.info("listening %s", kv(**listening, metrics_port=metrics_port))
                if guard is None:
                    log.info("callers are not asked who they are %s", kv(host=front.host))
                allocator.stay()
                async with self._background(engine, health):
                    verdict = await self._ending.verdict(self._begin_drain, front.drain_s)
                    return await self._end(verdict, server, engine, health)

    def _register(
        self, server: grpc.aio.Server, guard: Guard | None, start: Start, engine: EngineProcess
    ) -> rpc.Health:
        node = NodeService(
            role=self._role,
            mode=self._mode,
            config=self._config,
            instance=start.instance,
            engine_pid=engine.pid,
            engine=self._link,
            supervision=self._supervision,
            cache_feed=self._cache_feed,
            drain=self._ending.want,
        )
        names = list(rpc.add_service(server, node_pb2_grpc.add_NodeServicer_to_server, node, guard))
        for register in self._parts.services:
            names += register(server, guard)
        return rpc.add_health_and_reflection(server, names, guard)

    @asynccontextmanager
    async def _background(self, engine: EngineProcess, health: rpc.Health) -> AsyncIterator[None]:
        """What runs beside the calls, to the very end: until then the engine's transfer thread
        must not find its front gone."""
        work = [self._tell_health(health), self._watch(engine), allocator.keep_trimming()]
        work += [part() for part in self._parts.background]
        tasks = [asyncio.ensure_future(self._guarded(each)) for each in work]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except EngineFault as error:
            self._ending.engine_died(str(error))
        except Exception as error:
            log.exception("the front failed")
            self._ending.fault(f"the front failed: {type(error).__name__}: {error}")

    async def _tell_health(self, health: rpc.Health) -> None:
        while True:
            await health.tell(self._supervision.state(time.monotonic()) in SERVES)
            await asyncio.sleep(_HEALTH_INTERVAL_S)

    async def _watch(self, engine: EngineProcess) -> None:
        """Two signs of one end: of the process, and of its socket. Either is the node's end."""
        ended = asyncio.ensure_future(engine.ended())
        let_go = asyncio.ensure_future(self._engine_let_go.wait())
        try:
            await asyncio.wait({ended, let_go}, return_when="FIRST_COMPLETED")
            code = await engine.end(_LAST_WORDS_S)
            # Its last words may still be in the socket: they are the better reason.
            await asyncio.wait({let_go}, timeout=_LAST_WORDS_S)
        finally:
            ended.cancel()
            let_go.cancel()
        self._ending.engine_died(f"the engine {exit_sentence(code)}")

    def _notice(self, notice: Notice) -> None:
        match notice:
            case StepTokens():
                self._parts.step(notice)
            case OnTrial():
                self._parts.on_trial(notice)
            case HandoffTraced():
                self._parts.handoff(notice)
            case Pooled():
                self._parts.pooled(notice)
            case Moving():
                self._supervision.moved(notice, time.monotonic())
                self._metrics.engine_moved(notice)
                self._parts.moved(notice)
            case CacheChanged():
                self._cache_feed.changed(notice)
            case EngineReady():
                self._supervision.started(notice, time.monotonic())
                log.info("ready %s", kv(model=notice.model, pages=notice.num_pages))
            case Drained():
                self._ending.drained()
            case EngineFailed(config=True):
                self._ending.fault(notice.reason, 2)
            case EngineFailed():
                self._ending.engine_died(notice.reason)

    def _begin_drain(self) -> None:
        self._supervision.draining = True
        if self._supervision.ready is None:
            self._ending.now("nothing was running yet")
            return
        self._parts.drain()
        # Number 0: nobody waits for the answer. Drained is what counts.
        self._link.send(Ask(0, "drain"))

    async def _end(
        self, verdict: Verdict, server: grpc.aio.Server, engine: EngineProcess, health: rpc.Health
    ) -> int:
        self._supervision.draining = True
        await health.tell(False)
        if verdict.exit_code == 2:
            print(f"baton {self._role}: {verdict.reason}", file=sys.stderr)
        else:
            level = logging.ERROR if verdict.exit_code else logging.INFO
            log.log(level, "ending %s", kv(because=verdict.reason))
        error = EngineDied if verdict.engine_died else NodeUnavailable
        last = error(f"this node has ended: {verdict.reason}")
        self._parts.end(last)
        self._cache_feed.end(last)
        await rpc.stop(server, _STREAMS_S)
        self._link.close()
        code = await engine.end(_ENGINE_END_S if verdict.in_order else _HASTY_END_S)
        if verdict.in_order and code:
            log.error("the engine did not end in order %s", kv(engine=exit_sentence(code)))
            return 1
        return verdict.exit_code
