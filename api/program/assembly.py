"""Construction of a router, its requests' parts and its ports for clients.

It runs the parts and stops them in an order that protects clients."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc.aio

from api import paths
from api.dialect import problems
from api.dialect.generation_endpoint import ModelNames
from api.generation import Dispatcher
from api.grpc.inference import InferenceService
from api.grpc.service import AdminService, CallerResolver, add_router_service
from api.http.service import HttpServer, HttpService
from api.http.shared import HttpContext, HttpLimits
from api.http_checks import HttpChecks, check_paths
from api.page import files as page
from api.pooling.pooler import Pooler
from api.pooling.vectors import PoolingService, qwen3
from api.program.admin import AdminParts, make_admin
from api.program.nodes import RouterBase, RouterNodes, make_base, make_nodes
from api.requests.idempotency import IdempotencyCache
from api.requests.limiter import PriorityLimits, RequestLimiter
from api.text.limits import MAX_FIELDS
from api.text.model_files import ModelFiles
from common import rpc, tls
from common.config import RouterConfig
from common.logs import kv
from common.metrics.serving import served as served_metrics
from common.process.resources import keep_trimming
from router.cluster.cluster import Cluster
from router.metrics import RouterMetrics
from router.record import RequestRecords
from router.workers import ProcessSlot, alone, other_processes, serving_handlers


@dataclass(frozen=True, slots=True)
class RequestParts:
    """The parts of a router that serve requests.

    Attributes:
        names: model names that clients may use.
    """

    answers: IdempotencyCache
    vectors: PoolingService
    names: ModelNames


def make_requests(nodes: RouterNodes) -> RequestParts:
    """Make these parts.

    Raises:
        ConfigError: the model cannot make the configured vectors or scores.
    """
    base = nodes.base
    config, model = base.config, base.model
    records = RequestRecords(base.metrics, base.timelines)
    limits = {"budget_s": config.request_timeout_s, "queue_share": config.max_queue_fraction}
    generator = Dispatcher(
        model,
        nodes.cluster,
        base.admission,
        records,
        **limits,
        priorities=PriorityLimits(
            config.clients.priority,
            low_values_first=config.clients.low_priority_values_first,
        ),
        returns_cached_tokens=not config.hide_cached_tokens,
        stream_interval=config.stream_interval,
    )
    vectors = PoolingService(
        Pooler(model, nodes.pooling, base.admission, records, **limits),
        model.files.pooling,
        way=config.pooling_type,
        reranker=qwen3(model.tokenizer) if config.reranker == "qwen3" else None,
        has_nodes=bool(config.prefill),
    )
    name = config.served_model_name or model.files.name
    names = ModelNames(name, nodes.cluster.adapters.by_name)
    return RequestParts(
        IdempotencyCache(generator, keep_s=config.idempotency_ttl_s), vectors, names
    )


# Idle HTTP connections and probes. Each live request has one more.
_SPARE_CONNECTIONS = 1024


@dataclass(frozen=True, slots=True)
class GrpcServer:
    """A gRPC server that is bound to its port and not started.

    Attributes:
        shares_port: whether other processes of this router listen on the same port.
    """

    server: grpc.aio.Server
    health: rpc.Health
    port: int
    shares_port: bool


def make_grpc(
    base: RouterBase, requests: RequestParts, admin: AdminService, *, shares_port: bool
) -> GrpcServer:
    """Make the gRPC server.

    Raises:
        ConfigError: the port is taken.
    """
    config, model, guard = base.config, base.model, base.clients.guard
    callers = CallerResolver(guard)
    server = rpc.make_server(shares_port=shares_port, max_message_bytes=model.limits.message_bytes)
    inference = InferenceService(
        guard, requests.answers, requests.vectors, model, budget_s=config.request_timeout_s
    )
    names = add_router_service(server, inference, admin, callers, max_fields=MAX_FIELDS)
    health = rpc.add_health_and_reflection(server, names, callers)
    port = rpc.bind(
        server, config.server.host, config.server.port, base.certificates, shares_port=shares_port
    )
    return GrpcServer(server, health, port, shares_port)


def make_http(nodes: RouterNodes, requests: RequestParts, admin: AdminParts) -> HttpServer:
    """Make the HTTP server.

    Raises:
        KeyError: a path has no access rule.
    """
    base = nodes.base
    config, clients, metrics = base.config, base.clients, base.metrics
    checks = HttpChecks(clients.guard, clients.hosts, clients.cors, metrics)
    parts = paths.EndpointParts(
        base.model,
        requests.names,
        metrics,
        checks.begin,
        budget_s=config.request_timeout_s,
        ignore_unknown=config.ignore_unknown_fields,
    )
    routes = paths.routes(
        parts,
        requests.answers,
        requests.vectors,
        nodes.why_not_ready,
        others={**page.routes(), **admin.paths},
        others_below=admin.paths_below,
    )
    check_paths(routes.paths)
    limits = HttpLimits(
        max_connections=config.max_concurrent_requests + _SPARE_CONNECTIONS,
        max_body_bytes=base.model.limits.body_bytes,
        unread_s=config.slow_client_timeout_s,
    )
    contexts = (
        None if base.certificates is None else tls.server_contexts(base.certificates, "http/1.1")
    )
    shared = HttpContext(limits, problems.error_body, metrics)
    return HttpServer(shared, HttpService(shared, routes, checks), contexts)


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
        await self.grpc.health.set_serving(False)
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
    async with AsyncExitStack() as opened:
        base = make_base(config, model, opened.enter_context(ExitStack()))
        nodes = await make_nodes(base)
        requests = make_requests(nodes)
        others = await opened.enter_async_context(other_processes(place.others))
        keeper = await opened.enter_async_context(other_processes(place.keeper))
        admin = make_admin(nodes, requests.names, place, others, keeper, on_drain)
        grpc = make_grpc(base, requests, admin.service, shares_port=place.is_shared)
        metrics_port = await _serve_health_and_metrics(base, grpc, opened)
        http = make_http(nodes, requests, admin)
        await opened.enter_async_context(serving_handlers(place, others.handlers))
        begun = asyncio.create_task(nodes.membership.run())
        opened.push_async_callback(_end, begun)
        if place.again and nodes.generates:
            # Other processes listen as well. Until then, a client here would find no node.
            with suppress(TimeoutError):
                async with asyncio.timeout(FIRST_LOOK_S):
                    await nodes.cluster.until_first_ready()
        http_port = await http.start(
            config.server.host, config.http_port, shares_port=place.is_shared
        )
        opened.push_async_callback(http.stop, _LAST_WORDS_S)
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
    base: RouterBase, grpc: GrpcServer, opened: AsyncExitStack
) -> int | None:
    """Open the ports for metrics and health checks. Return the port for metrics, None: none."""
    server = base.config.server
    metrics_port = opened.enter_context(
        served_metrics(base.metrics.registry, server.host, server.metrics_port)
    )
    await grpc.health.set_serving(False)
    await opened.enter_async_context(
        rpc.serving_health(
            grpc.health, server.host, server.health_port, shares_port=grpc.shares_port
        )
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
