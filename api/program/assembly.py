"""Construction of a router. It runs the parts and stops them in an order that protects clients."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from api.http.server import HttpServer
from api.program.admin import make_admin
from api.program.base import RouterBase, make_base
from api.program.nodes import RouterNodes, make_nodes
from api.program.ports import GrpcServer, make_grpc, make_http
from api.program.requests import make_requests
from api.requests.limiter import RequestLimiter
from api.text.model_files import ModelFiles
from common import rpc, tls
from common.config import RouterConfig
from common.logs import kv
from common.metrics.serving import served as served_metrics
from common.process.resources import keep_trimming
from router.cluster.cluster import Cluster
from router.metrics import RouterMetrics
from router.workers.asking import siblings
from router.workers.place import ProcessSlot, alone
from router.workers.telling import told

log = logging.getLogger(__name__)

FIRST_LOOK_S = 5.0  # for nodes to respond to a replacement process, before it listens
_LAST_WORDS_S = 1.0  # time for the ends of calls to reach their clients


@dataclass(frozen=True, slots=True)
class RunningRouter:
    """A running router.

    Attributes:
        following: keeps the streams of the nodes. Requests end with it.
        readiness: reports the readiness to health checks.
    """

    nodes: RouterNodes
    grpc: GrpcServer
    http: HttpServer
    http_port: int
    following: asyncio.Task[None]
    readiness: asyncio.Task[None]

    @property
    def port(self) -> int:
        return self.grpc.port

    @property
    def cluster(self) -> Cluster:
        return self.nodes.cluster

    @property
    def metrics(self) -> RouterMetrics:
        return self.nodes.base.metrics

    @property
    def admission(self) -> RequestLimiter:
        return self.nodes.base.admission

    async def drain(self, longest_s: float, hurry: asyncio.Event) -> None:
        """Drain the router: accept no new requests and let live ones finish.

        Requests that have not finished after `longest_s`, or when `hurry` is set, end with
        UNAVAILABLE. If other processes listen on the same ports, new connections go to them, and
        requests on existing connections of this process are served. Otherwise new requests are
        rejected.
        """
        self.readiness.cancel()
        await self.grpc.health.tell(False)
        log.info("draining %s", kv(live=self.admission.num_live, longest_s=longest_s))
        if self.grpc.shares_port:
            self.admission.leave()
            self.http.stop_listening()
            stopping = asyncio.create_task(rpc.stop(self.grpc.server, longest_s))
            await _first_of(self._all_is_served(), hurry.wait(), longest_s)
            stopping.cancel()
        self.admission.close()
        self.http.drain()
        await _first_of(self.admission.wait_until_none_live(), hurry.wait(), longest_s)
        self.following.cancel()  # a request ends with the stream of its node
        await _first_of(self.admission.wait_until_none_live(), hurry.wait(), _LAST_WORDS_S)

    async def _all_is_served(self) -> None:
        """Wait for connections, too: a request that is still being received is not live yet."""
        self.http.drain()
        await self.admission.wait_until_none_live()
        await self.http.wait_until_all_gone(_LAST_WORDS_S)
        await self.admission.wait_until_none_live()


@asynccontextmanager
async def run_router(
    config: RouterConfig,
    model: ModelFiles,
    place: ProcessSlot | None = None,
    on_drain: Callable[[], None] = lambda: None,
) -> AsyncIterator[RunningRouter]:
    """Run a router in this context.

    It listens immediately, and is healthy once it can place a request.

    Args:
        place: this process among the worker processes that share the router's ports, see
            api/program/processes.py. None: it is the whole router.
        on_drain: called when an operator drains the router, if this process is the whole router.

    Raises:
        ConfigError: a port is taken, an entry of --prefill or --decode is invalid, or the tokenizer
            or chat template cannot be used.
    """
    place = place or alone()
    async with AsyncExitStack() as resources:
        base = make_base(config, model, resources.enter_context(ExitStack()))
        nodes = await make_nodes(base)
        requests = make_requests(nodes)
        others = await resources.enter_async_context(siblings(place.others))
        keeper = await resources.enter_async_context(siblings(place.keeper))
        admin = make_admin(nodes, requests.names, place, others, keeper, on_drain)
        grpc = make_grpc(base, requests, admin.service, shares_port=place.is_shared)
        metrics_port = await _serve_health_and_metrics(base, grpc, resources)
        http = make_http(nodes, requests, admin)
        await resources.enter_async_context(told(place, others.tells))
        begun = asyncio.create_task(nodes.membership.run())
        resources.push_async_callback(_end, begun)
        if place.again and nodes.generates:
            # Other processes listen as well. Until then, a client here would find no node.
            with suppress(TimeoutError):
                async with asyncio.timeout(FIRST_LOOK_S):
                    await nodes.cluster.until_first_ready()
        http_port = await http.start(
            config.server.host, config.http_port, shares_port=place.is_shared
        )
        resources.push_async_callback(http.stop, _LAST_WORDS_S)
        await grpc.server.start()
        _log_start(base, grpc, http_port, metrics_port)
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(_followed(begun))
            readiness = tasks.create_task(nodes.report_readiness(grpc.health))
            keys = tasks.create_task(base.clients.keep_up())
            trimming = tasks.create_task(keep_trimming())
            sampling = tasks.create_task(admin.recent.run())
            try:
                yield RunningRouter(nodes, grpc, http, http_port, following, readiness)
            finally:
                for task in (readiness, following, keys, trimming, sampling):
                    task.cancel()
                await rpc.stop(grpc.server, _LAST_WORDS_S)


async def _serve_health_and_metrics(
    base: RouterBase, grpc: GrpcServer, resources: AsyncExitStack
) -> int | None:
    """Open the ports for metrics and health checks. Return the port for metrics, None: none."""
    front = base.config.server
    metrics_port = resources.enter_context(
        served_metrics(base.metrics.registry, front.host, front.metrics_port)
    )
    await grpc.health.tell(False)
    await resources.enter_async_context(
        rpc.serving_health(grpc.health, front.host, front.health_port, shares_port=grpc.shares_port)
    )
    return metrics_port


def _log_start(
    base: RouterBase, grpc: GrpcServer, http_port: int, metrics_port: int | None
) -> None:
    host = base.config.server.host
    log.info(
        "listening %s",
        kv(
            address=f"{host}:{grpc.port}",
            http=f"{host}:{http_port}",
            tls=tls.kind(base.certificates),
            secret="on" if base.clients.has_secret else "off",
            metrics_port=metrics_port,
            policy=base.config.policy,
            model=base.model.files.name,
        ),
    )


async def _followed(task: asyncio.Task[None]) -> None:
    """Wait for a task. Cancelling this cancels the task."""
    await task


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


async def _first_of(
    one: Coroutine[Any, Any, object], other: Coroutine[Any, Any, object], longest_s: float
) -> None:
    waits = {asyncio.create_task(one), asyncio.create_task(other)}
    _, pending = await asyncio.wait(waits, timeout=longest_s, return_when=asyncio.FIRST_COMPLETED)
    for wait in pending:
        wait.cancel()
