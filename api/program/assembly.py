"""Construction of a router and its ports for clients.

Runs the parts, and stops them in an order that lets requests finish.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

import grpc.aio
from prometheus_client import CollectorRegistry

from api.dialect import problems
from api.generation import RequestLimiter
from api.grpc.inference import InferenceService
from api.grpc.service import (
    ROUTER_SERVICE,
    CallerResolver,
    Method,
    add_router_service,
)
from api.http.acceptor import HttpContext, HttpLimits
from api.http.service import HttpServer, HttpService
from api.http_checks import HttpChecks, check_paths
from api.page import files as page
from api.program import paths
from api.program.admin import AdminParts, make_admin
from api.program.nodes import ModelPool, Pools, RouterBase, make_base, make_pool
from api.requests.generate_params import MAX_FIELDS
from api.requests.served_model import ByModel
from api.text.model_files import ModelFiles
from common import rpc, tls
from common.config import RouterConfig
from common.logs import kv
from common.metrics.serving import served as served_metrics
from common.process.resources import keep_trimming
from common.process.waiting import first_of
from router.cluster.cluster import Cluster
from router.metrics import RouterMetrics, registry_of_models
from router.workers import ProcessSlot, alone, other_processes, serving_handlers

log = logging.getLogger(__name__)

# Idle HTTP connections and probes, in addition to one connection for each live request.
_SPARE_CONNECTIONS = 1024


@dataclass(frozen=True, slots=True)
class GrpcServer:
    """A gRPC server that is bound to its port and not started.

    Attributes:
        shares_port: other processes of this router listen on the same port.
    """

    server: grpc.aio.Server
    health: rpc.Health
    port: int
    shares_port: bool


def make_grpc(
    base: RouterBase, pools: Pools, admin: Mapping[str, Method], *, shares_port: bool
) -> GrpcServer:
    """Make the gRPC server. Raise ConfigError if its port is taken."""
    config, guard = base.config, base.clients.guard
    callers = CallerResolver(guard)
    message_bytes = max(pool.model.limits.message_bytes for pool in pools.values())
    server = rpc.make_server(shares_port=shares_port, max_message_bytes=message_bytes)
    inference = {
        name: InferenceService(
            guard,
            pool.idempotency,
            pool.pooling_service,
            pool.model,
            served_name=name,
            budget_s=config.request_timeout_s,
        )
        for name, pool in pools.items()
    }
    names = add_router_service(server, ByModel(inference), admin, callers, max_fields=MAX_FIELDS)
    health = rpc.add_health_and_reflection(server, names, callers)
    port = rpc.bind(
        server, config.server.host, config.server.port, base.certificates, shares_port=shares_port
    )
    return GrpcServer(server, health, port, shares_port)


def make_http(base: RouterBase, pools: Pools, admin: AdminParts) -> HttpServer:
    """Make the HTTP server. Raise KeyError if a path has no access rule."""
    config, clients, metrics = base.config, base.clients, base.metrics
    checks = HttpChecks(clients.guard, clients.hosts, clients.cors, metrics)
    routes = paths.routes(
        list(pools.values()),
        metrics,
        checks.begin,
        others={**page.routes(), **admin.paths},
        others_below=admin.paths_below,
    )
    check_paths(routes.paths)
    max_requests = sum(pool.admission.max_requests for pool in pools.values())
    limits = HttpLimits(
        max_connections=max_requests + _SPARE_CONNECTIONS,
        max_body_bytes=max(pool.model.limits.body_bytes for pool in pools.values()),
        unread_s=config.slow_client_timeout_s,
    )
    contexts = None if base.certificates is None else tls.server_contexts(base.certificates)
    shared = HttpContext(limits, problems.error_body, metrics)
    return HttpServer(shared, HttpService(shared, routes, checks), contexts)


FIRST_LOOK_S = 5.0  # seconds for nodes to respond to a replacement process before it listens
_LAST_WORDS_S = 1.0  # seconds for the ends of calls to reach their clients


@dataclass(frozen=True, slots=True)
class RunningRouter:
    """A running router.

    Attributes:
        following: tasks that keep the nodes' streams. Requests end with them.
        readiness: tasks that report the readiness to health checks.
    """

    base: RouterBase
    pools: Pools
    grpc: GrpcServer
    http: HttpServer
    http_port: int
    following: Sequence[asyncio.Task[None]]
    readiness: Sequence[asyncio.Task[None]]

    @property
    def port(self) -> int:
        return self.grpc.port

    @property
    def cluster(self) -> Cluster:
        """Return the nodes of the first model."""
        return next(iter(self.pools.values())).cluster

    @property
    def admission(self) -> RequestLimiter:
        """Return the limiter of the first model."""
        return next(iter(self.pools.values())).admission

    @property
    def metrics(self) -> RouterMetrics:
        return self.base.metrics

    async def drain(self, longest_s: float, hurry: asyncio.Event) -> None:
        """Drain the router: accept no new requests and let live ones finish.

        After `longest_s` seconds, or when `hurry` is set, remaining requests end with UNAVAILABLE.
        If other processes listen on the same ports, new connections go to them, and this process
        still serves requests on its existing connections. Otherwise it rejects new requests.
        """
        for task in self.readiness:
            task.cancel()
        await _report_health(self.grpc, dict.fromkeys(self.pools, False))
        limiters = [pool.admission for pool in self.pools.values()]
        live = sum(each.num_live for each in limiters)
        log.info("draining %s", kv(live=live, longest_s=longest_s))
        if self.grpc.shares_port:
            for each in limiters:
                each.leave()
            self.http.stop_listening()
            stopping = asyncio.create_task(rpc.stop(self.grpc.server, longest_s))
            await first_of(self._all_is_served(), hurry.wait(), longest_s=longest_s)
            stopping.cancel()
        for each in limiters:
            each.close()
        self.http.drain()
        await first_of(self._none_live(), hurry.wait(), longest_s=longest_s)
        for task in self.following:
            task.cancel()  # requests end with the stream of their node
        await first_of(self._none_live(), hurry.wait(), longest_s=_LAST_WORDS_S)

    async def _all_is_served(self) -> None:
        """Wait for requests and connections: a request is not live while it is received."""
        self.http.drain()
        await self._none_live()
        await self.http.wait_until_all_gone(_LAST_WORDS_S)
        await self._none_live()

    async def _none_live(self) -> None:
        for pool in self.pools.values():
            await pool.admission.wait_until_none_live()


@asynccontextmanager
async def run_router(
    config: RouterConfig,
    files: Sequence[ModelFiles],
    place: ProcessSlot | None = None,
    on_drain: Callable[[], None] = lambda: None,
) -> AsyncIterator[RunningRouter]:
    """Run a router in this context.

    It listens immediately, and is healthy once it can place a request of any model.

    Args:
        files: files of the models, in the order of `config.each_model`.
        place: position of this process among the worker processes (api/program/processes.py). None:
            it is the only one.
        on_drain: called when an operator drains a router with one process.

    Raises:
        ConfigError: a port is taken, an entry of --prefill or --decode is invalid, or the tokenizer
            or chat template cannot be used.
    """
    place = place or alone()
    async with AsyncExitStack() as opened:
        resources = opened.enter_context(ExitStack())
        base = make_base(config, resources)
        made = [
            await make_pool(base, each, files_of_one, resources)
            for each, files_of_one in zip(config.each_model, files, strict=True)
        ]
        pools = {pool.name: pool for pool in made}
        others = await opened.enter_async_context(other_processes(place.others))
        keeper = await opened.enter_async_context(other_processes(place.keeper))
        registry = _registry(base, pools)
        admin = make_admin(base, pools, registry, place, others, keeper, on_drain)
        grpc = make_grpc(base, pools, admin.methods, shares_port=place.is_shared)
        metrics_port = await _serve_health_and_metrics(base, registry, grpc, opened)
        http = make_http(base, pools, admin)
        await opened.enter_async_context(serving_handlers(place, others.handlers))
        begun = [asyncio.create_task(pool.membership.run()) for pool in made]
        opened.push_async_callback(_end, begun)
        if place.again:
            await _first_look(made)
        http_port = await http.start(
            config.server.host, config.http_port, shares_port=place.is_shared
        )
        opened.push_async_callback(http.stop, _LAST_WORDS_S)
        await grpc.server.start()
        _log_start(base, pools, grpc, http_port, metrics_port)
        async with _background(base, pools, admin, grpc, begun) as (following, readiness):
            yield RunningRouter(base, pools, grpc, http, http_port, following, readiness)


@asynccontextmanager
async def _background(
    base: RouterBase,
    pools: Pools,
    admin: AdminParts,
    grpc: GrpcServer,
    begun: Sequence[asyncio.Task[None]],
) -> AsyncIterator[tuple[Sequence[asyncio.Task[None]], Sequence[asyncio.Task[None]]]]:
    """Run the router's background tasks, and stop the gRPC server at the end.

    Yields the tasks that follow the nodes' streams, and those that report the readiness.
    """

    async def update_health() -> None:
        await _report_health(grpc, {name: pool.ready for name, pool in pools.items()})

    async with asyncio.TaskGroup() as tasks:
        following = [tasks.create_task(_followed(each)) for each in begun]
        readiness = [
            tasks.create_task(pool.report_readiness(update_health)) for pool in pools.values()
        ]
        others = base.clients.keep_up(), keep_trimming(), admin.recent.run()
        running = [*readiness, *following, *map(tasks.create_task, others)]
        try:
            yield following, readiness
        finally:
            for task in running:
                task.cancel()
            await rpc.stop(grpc.server, _LAST_WORDS_S)


def _registry(base: RouterBase, pools: Pools) -> CollectorRegistry:
    if not base.config.models:
        return base.metrics.registry
    return registry_of_models(base.metrics, {name: pool.metrics for name, pool in pools.items()})


async def _first_look(pools: Sequence[ModelPool]) -> None:
    """Wait for the nodes of a replacement process, while other processes listen."""
    clusters = [pool.cluster for pool in pools if pool.generates]
    with suppress(TimeoutError):
        async with asyncio.timeout(FIRST_LOOK_S):
            await asyncio.gather(*(cluster.until_first_ready() for cluster in clusters))


async def _report_health(grpc: GrpcServer, ready: Mapping[str, bool]) -> None:
    """Report the router's readiness, and that of each of several models, to gRPC health checks."""
    await grpc.health.set_serving(any(ready.values()))
    if len(ready) > 1:
        for name, is_ready in ready.items():
            await grpc.health.set_service(f"{ROUTER_SERVICE}/{name}", is_ready)


async def _serve_health_and_metrics(
    base: RouterBase, registry: CollectorRegistry, grpc: GrpcServer, opened: AsyncExitStack
) -> int | None:
    """Open the ports for metrics and health checks. Return the port for metrics, or None."""
    server = base.config.server
    metrics_port = opened.enter_context(served_metrics(registry, server.host, server.metrics_port))
    await grpc.health.set_serving(False)
    await opened.enter_async_context(
        rpc.serving_health(
            grpc.health, server.host, server.health_port, shares_port=grpc.shares_port
        )
    )
    return metrics_port


def _log_start(
    base: RouterBase,
    pools: Pools,
    grpc: GrpcServer,
    http_port: int,
    metrics_port: int | None,
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
            model=",".join(pool.model.files.name for pool in pools.values()),
        ),
    )


async def _followed(task: asyncio.Task[None]) -> None:
    """Wait for a task. Cancelling this cancels the task."""
    await task


async def _end(begun: Sequence[asyncio.Task[None]]) -> None:
    for task in begun:
        task.cancel()
    await asyncio.wait(begun)
