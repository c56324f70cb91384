"""The time of a node in one role: its gRPC server, its streams, the handling of engine messages,
and its end.

Everything here is created for each role, including the instance id. To peers and routers, a node
that changes its role is one node that ends and another that starts.
"""

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc.aio

from common import rpc, tls
from common.errors import (
    DeadlineExceeded,
    EngineFault,
    FailedPrecondition,
    NodeUnavailable,
    ServingError,
)
from common.identity.guard import CallAuthenticator, node_name
from common.identity.program import guard_of, identity_of
from common.identity.tokens import Identity
from common.logs import kv
from common.metrics.program import TrustMetrics
from common.tracing import context
from node.frontend.engine_link import (
    SERVES,
    EngineLink,
    EngineSupervisor,
    NodeFrontend,
    RoleProgram,
    RoleServices,
)
from node.frontend.service import CacheFeed, NodeIdentity, NodeService
from node.messages import (
    CacheEventBatch,
    Drained,
    DrainNode,
    EngineFailed,
    EngineMessage,
    EngineReady,
    EngineStats,
    GroupDrains,
    HandoffSpan,
    KvEvents,
    NodeCall,
    PoolingDone,
    PrepareRole,
    QuarantineStarted,
    ResumeNode,
    StartRole,
    StepTokens,
)
from node.metrics import NodeMetrics, Role
from protos import node_pb2_grpc

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExitVerdict:
    reason: str
    exit_code: int = 0
    in_order: bool = False  # whether no work was in progress any more
    engine_died: bool = False


class ProcessExit:
    """Collects the causes of a node's end. The first cause decides the verdict. Event loop only.

    SIGTERM, SIGINT or Drain, then drained, drain timeout or a second signal: exit code 0. A signal
    after a Drain call counts as the first one, because Kubernetes sends SIGTERM after the preStop
    hook has called Drain. Fault at any time: exit code 1, or 2 if the user must fix the
    configuration.

    If the role ends first, the node continues in another one. A request to end the node stays
    valid.
    """

    def __init__(self) -> None:
        self._wanted = asyncio.Event()
        self._role_over = asyncio.Event()
        self._signalled = False
        self._verdict: asyncio.Future[ExitVerdict] = asyncio.get_running_loop().create_future()

    def signalled(self, name: str) -> None:
        """Handle a signal. The first one requests a drain, any other ends the node immediately."""
        if self._signalled:
            self.now(f"second signal {name}")
        self._signalled = True
        self.want(name)

    def want(self, who: str) -> None:
        """Request a drain. Idempotent."""
        if not self._wanted.is_set():
            log.info("draining %s", kv(reason=who))
            self._wanted.set()

    @property
    def wanted(self) -> bool:
        return self._wanted.is_set()

    def drained(self) -> None:
        """Record that no work is left. Ends the node only if a drain was requested."""
        if self.wanted:
            self._decide(ExitVerdict("drained", in_order=True))

    def role_over(self) -> None:
        """Record that the role has ended and the node continues in another one."""
        self._role_over.set()

    def now(self, reason: str) -> None:
        """End the node as requested, without waiting."""
        self._decide(ExitVerdict(reason))

    def fault(self, reason: str, exit_code: int = 1) -> None:
        self._decide(ExitVerdict(reason, exit_code))

    def engine_died(self, reason: str) -> None:
        self._decide(ExitVerdict(reason, 1, engine_died=True))

    async def verdict(self, begin_drain: Callable[[], None], drain_s: float) -> ExitVerdict | None:
        """Wait for the end of the node, or of its role (None). `begin_drain` is called once a drain
        is requested, which may then take `drain_s`.
        """
        wanted = asyncio.ensure_future(self._wanted.wait())
        over = asyncio.ensure_future(self._role_over.wait())
        either: set[asyncio.Future[Any]] = {wanted, over, self._verdict}
        await asyncio.wait(either, return_when="FIRST_COMPLETED")
        wanted.cancel()
        over.cancel()
        if not self._verdict.done():
            if self._role_over.is_set():
                self._role_over.clear()
                return None
            begin_drain()
            await asyncio.wait({self._verdict}, timeout=drain_s)
            self.now(f"requests were still running after {drain_s:g} s")
        return self._verdict.result()

    async def _guarding(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine of the frontend. A fault in it ends the node."""
        try:
            await work
        except EngineFault as error:
            self.engine_died(str(error))
        except Exception as error:
            log.exception("server process failed")
            self.fault(f"the frontend failed: {type(error).__name__}: {error}")

    @asynccontextmanager
    async def guarded(self, work: Iterable[Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
        """Run coroutines of the frontend inside the context, then cancel them."""
        tasks = [asyncio.ensure_future(self._guarding(each)) for each in work]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def before(self, done: asyncio.Future[Any], timeout_s: float) -> ExitVerdict | None:
        """Wait until `done` and return None. If the node ends first, return the verdict. The node
        also ends after `timeout_s`.
        """
        either: set[asyncio.Future[Any]] = {done, self._verdict}
        await asyncio.wait(either, timeout=timeout_s, return_when="FIRST_COMPLETED")
        if done.done() and not self._verdict.done():
            return None
        done.cancel()
        self.fault(f"the engine did not start its new role within {timeout_s:g} s")
        return self._verdict.result()

    def _decide(self, verdict: ExitVerdict) -> None:
        if not self._verdict.done():
            self._verdict.set_result(verdict)


_HEALTH_INTERVAL_S = 0.2
_STREAMS_S = 1.0  # for streams to send their error at the end


@dataclass(frozen=True, slots=True)
class TenurePost:
    """The values with which a node enters a role.

    Attributes:
        identity: identity of the node, with its instance id in this role.
        guard: authenticates calls to its server.
        ready: the engine's EngineReady. None: its model is not loaded yet.
    """

    program: RoleProgram
    start: StartRole
    certificates: tls.Certificates | None
    identity: Identity | None
    guard: CallAuthenticator | None
    ready: EngineReady | None = None

    @classmethod
    def of(cls, program: RoleProgram, address: str, trust: TrustMetrics) -> "TenurePost":
        """Create a post with a new instance id.

        Raises:
            ConfigError: certificates or the cluster secret are invalid or missing.
        """
        server = program.config.server
        start = StartRole(
            role=program.role,
            config=program.config.model_dump_json(),
            instance=secrets.randbits(64),
            address=address,
        )
        certificates = tls.certificates(server.tls, "--server.tls")
        if certificates is not None:
            trust.certificate_ends("shown", partial(tls.shown_end, certificates))
            trust.certificate_ends("authority", partial(tls.authority_end, certificates))
        identity = identity_of("node", node_name(start.instance), server.secret_file, trust.refused)
        guard = guard_of(server, identity, certificates, trust.refused)
        return cls(program, start, certificates, identity, guard)


PREPARE_S = 600.0  # for host pages to be pinned, and graphs to be captured


class RoleTenure:
    """The node in one role. Event loop only.

    A switch to another role:

        SERVING --switch--> DRAINING --nothing left--> PREPARING --made--> over: the other begins
           ^                   |                          |
           `-----too long------+-------it cannot be-------'

    No request is lost: requests that could not migrate continue here if the switch fails.

    Args:
        transfer_socket: to the engine's transfer thread, of this role.
        program_of: returns a role by name. Raises ServingError if this node cannot have it.
        publish: sends a batch of KV events to the subscribers.
    Attributes:
        successor: the next role, once this one has ended.
    """

    def __init__(
        self,
        post: TenurePost,
        transfer_socket: socket.socket,
        engine: EngineLink,
        metrics: NodeMetrics,
        ending: ProcessExit,
        *,
        engine_pid: int,
        program_of: Callable[[str], RoleProgram],
        publish: Callable[[bytes], None],
    ) -> None:
        config = post.program.config
        self._post = post
        self._transfer_socket = transfer_socket
        self._config = config
        self._engine = engine
        self._engine_pid = engine_pid
        self._metrics = metrics
        self._ending = ending
        self._publish = publish
        self._supervision = EngineSupervisor(config.engine_heartbeat_timeout_s)
        metrics.begin(post.program.role)
        metrics.liveness = lambda: self._supervision.liveness(time.monotonic())
        self._cache_feed = CacheFeed(engine)
        self._parts = RoleServices(services=())
        self._over = False
        self._health: rpc.Health
        self._server: grpc.aio.Server
        self._program_of = program_of
        self._drained = asyncio.Event()
        self._switching: asyncio.Task[None] | None = None
        self.successor: RoleProgram | None = None
        if post.ready is not None:
            self.notice(post.ready)

    @property
    def role(self) -> Role:
        return self._post.program.role

    @property
    def is_paused(self) -> bool:
        return self._supervision.state(time.monotonic()) == "paused"

    @asynccontextmanager
    async def serving(self, metrics_port: int | None) -> AsyncIterator[None]:
        """Serve inside the context. Streams stay open until the very end, because the engine's
        transfer thread needs its frontend until then.
        """
        server, start = self._config.server, self._post.start
        certificates, identity = self._post.certificates, self._post.identity
        self._server = rpc.make_server(rpc.NODE_SERVER_OPTIONS, shares_port=True)
        port = int(start.address.rpartition(":")[2])
        rpc.bind(self._server, server.host, port, certificates, shares_port=True)
        with ExitStack() as stack:
            tracer = context.start(server, f"baton-{self._post.program.role}")
            if tracer is not None:
                stack.callback(tracer.close)
            self._parts = self._post.program.parts(
                NodeFrontend(
                    instance=start.instance,
                    address=start.address,
                    engine=self._engine,
                    metrics=self._metrics,
                    supervision=self._supervision,
                    make_channel=partial(
                        rpc.make_channel, certificates=certificates, identity=identity
                    ),
                    tracer=tracer,
                    transfer_socket=self._transfer_socket,
                )
            )
            self._health = self._register()
            await self._health.set_serving(False)
            async with rpc.serving_health(
                self._health, server.host, server.health_port, shares_port=True
            ):
                await self._server.start()
                listening = {
                    "address": rpc.join_address(server.host, port),
                    "tls": tls.kind(certificates),
                }
                listening["secret"] = "off" if identity is None else "on"
                log.info("listening %s", kv(**listening, metrics_port=metrics_port))
                if self._post.guard is None:
                    log.info("authentication is disabled %s", kv(host=server.host))
                async with self._background():
                    yield

    def notice(self, notice: EngineMessage) -> None:
        match notice:
            case StepTokens():
                self._parts.step(notice)
            case QuarantineStarted():
                self._parts.on_quarantine(notice)
            case HandoffSpan():
                self._parts.handoff(notice)
            case PoolingDone():
                self._parts.pooled(notice)
            case EngineStats():
                self._supervision.moved(notice, time.monotonic())
                self._metrics.report = notice
                self._parts.moved(notice)
            case CacheEventBatch():
                self._cache_feed.changed(notice)
            case EngineReady():
                self._supervision.started(notice, time.monotonic())
                log.info("ready %s", kv(model=notice.model, pages=notice.num_pages))
            case GroupDrains():
                self._ending.want("a node of the group drains")
            case Drained():
                self._drained.set()
                self._ending.drained()
            case KvEvents():
                self._publish(notice.payload)
            case EngineFailed(config=True):
                self._ending.fault(notice.reason, 2)
            case EngineFailed():
                self._ending.engine_died(notice.reason)

    def begin_drain(self) -> None:
        """Begin to drain, because the node must end. A switch is cancelled."""
        if self._switching is not None:
            self._switching.cancel()
        if self._supervision.ready is None:
            self._supervision.draining = True
            self._ending.now("nothing was running yet")
            return
        self._pause()

    async def end(self, last: ServingError) -> None:
        """End every stream with this error, and stop the server. Idempotent."""
        self._over = self._supervision.draining = True
        await self._health.set_serving(False)
        self._parts.end(last)
        self._cache_feed.end(last)
        await rpc.stop(self._server, _STREAMS_S)

    async def switch(self, role: str) -> None:
        """Switch to another role. Returns when that role is about to begin. The switch continues if
        the caller is cancelled.

        Raises:
            ServingError: the node keeps its role, for the reason in the message.
        """
        self._engine.check_ready()
        program = self._program_of(role)
        if self._switching is not None:
            raise FailedPrecondition("this node is already changing its role")
        self._switching = task = asyncio.ensure_future(self._switch(program))
        await asyncio.wait({task})
        if task.cancelled():
            raise NodeUnavailable("this node is shutting down")
        task.result()

    async def _switch(self, program: RoleProgram) -> None:
        log.info("changing role %s", kv(to=program.role))
        self._drained.clear()
        self._pause()
        try:
            await self._until_drained()
            await self._engine.ask(PrepareRole(program.role), timeout_s=PREPARE_S)
        except ServingError as error:
            log.warning("role change failed %s", kv(to=program.role, reason=error))
            self._switching = None
            self._resume()
            raise
        self.successor = program
        self._ending.role_over()

    async def _until_drained(self) -> None:
        drain_s = self._config.server.drain_timeout_s
        try:
            async with asyncio.timeout(drain_s):
                await self._drained.wait()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the requests of this node neither ended nor migrated within {drain_s:g} s"
            ) from None

    def _pause(self) -> None:
        self._supervision.draining = True
        self._parts.drain()
        # Number 0: the response is ignored, and Drained follows.
        self._engine.send(NodeCall(0, DrainNode()))

    def _resume(self) -> None:
        self._supervision.draining = False
        self._engine.send(NodeCall(0, ResumeNode()))
        self._parts.resume()

    def _register(self) -> rpc.Health:
        guard, program = self._post.guard, self._post.program
        parallel = self._config.engine.parallel
        node = NodeService(
            identity=NodeIdentity(
                program.role,
                program.mode,
                self._config.engine.model,
                self._post.start.instance,
                self._engine_pid,
                "" if parallel.dp_group is None else parallel.dp_group.name,
                parallel.dp_rank,
            ),
            engine=self._engine,
            supervision=self._supervision,
            cache_feed=self._cache_feed,
            drain=self._ending.want,
            switch=self.switch,
            pair_with=self._parts.pair_with,
        )
        add = node_pb2_grpc.add_NodeServicer_to_server
        names = list(rpc.add_service(self._server, add, node, guard))
        for register in self._parts.services:
            names += register(self._server, guard)
        return rpc.add_health_and_reflection(self._server, names, guard)

    def _background(self) -> AbstractAsyncContextManager[None]:
        work = [self._report_health(), *(part() for part in self._parts.background)]
        return self._ending.guarded(self._until_over(each) for each in work)

    async def _until_over(self, work: Coroutine[Any, Any, None]) -> None:
        """Run background work. After the end of the role, the loss of the engine's transfer thread
        is no fault.
        """
        try:
            await work
        except EngineFault:
            if not self._over:
                raise

    async def _report_health(self) -> None:
        reported = False
        while True:
            serves = self._supervision.state(time.monotonic()) in SERVES
            if serves != reported:
                reported = serves
                await self._health.set_serving(serves)
            await asyncio.sleep(_HEALTH_INTERVAL_S)
