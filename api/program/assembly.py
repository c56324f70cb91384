"""Construction of a router. It runs the parts and stops them in an order that protects clients."""

import asyncio
import logging
import secrets
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc.aio

from api.admin import metrics_endpoint, requests_endpoint
from api.admin.adapters import AdaptersEndpoint
from api.admin.cluster_report import ClusterEndpoint, ClusterReport
from api.admin.engines import EnginesEndpoint
from api.admin.explain import Explainer, LocalEvents
from api.admin.metrics_endpoint import MergedMetricsEndpoint, MetricsEndpoint
from api.admin.moves import LocalMigrations, MigrationService
from api.admin.plans import LocalPlans, Plans
from api.admin.requests_endpoint import LocalRequests, RequestsEndpoint
from api.admin.router_state import LocalState, MergedState
from api.auth.assembly import make_clients
from api.dialect.model_names import ModelNames
from api.generation import Dispatcher
from api.grpc.callers import CallerResolver
from api.grpc.service import InferenceService
from api.http.server import HttpServer
from api.pooling.pooler import Pooler
from api.pooling.vectors import PoolingService
from api.pooling.yes_or_no import qwen3
from api.program.http import make_http
from api.requests.idempotency import IdempotencyCache
from api.requests.limiter import RequestLimiter
from api.requests.priorities import PriorityLimits
from api.requests.record import RequestRecords
from api.requests.served_model import served_model
from api.text.limits import MAX_FIELDS
from api.text.model_files import ModelFiles
from common import rpc, tls
from common.config import RouterConfig
from common.identity import exposure
from common.identity.program import identity_of
from common.logs import kv
from common.metrics.serving import served as served_metrics
from common.metrics.trust import TrustMetrics
from common.process import allocator
from common.tracing import export
from common.version import VERSION
from protos import router_pb2, router_pb2_grpc
from router.cluster.adapter_calls import AdapterCalls
from router.cluster.cache_watch import CacheWatch
from router.cluster.cluster import NOT_READY, SHUTTING_DOWN, Cluster
from router.cluster.discovery import Discovery
from router.cluster.engine_calls import EngineCalls
from router.cluster.engine_pulse import LivenessLimits
from router.cluster.inquiry import NodeDescriber
from router.cluster.membership import Membership
from router.cluster.pooling_nodes import NO_PREFILL_NODE, PoolingNodes
from router.cluster.survey import ClusterState, NodeReport
from router.metrics import RouterMetrics
from router.policy import HEED_PREFIXES, make_policy
from router.policy.hints import PrefixHints
from router.policy.load import NodeLoad
from router.policy.prefix_index import PrefixIndex
from router.timelines import TimelineRecorder
from router.workers.asking import siblings
from router.workers.ends import LocalEnd, SharedEnd
from router.workers.place import ProcessSlot, alone
from router.workers.telling import told

log = logging.getLogger(__name__)

FIRST_LOOK_S = 5.0  # for nodes to respond to a replacement process, before it listens
_LAST_WORDS_S = 1.0  # time for the ends of calls to reach their clients


@dataclass(frozen=True, slots=True)
class RunningRouter:
    """A running router."""

    port: int
    http_port: int
    http: HttpServer
    server: grpc.aio.Server
    shares_port: bool
    health: rpc.Health
    admission: RequestLimiter
    cluster: Cluster
    metrics: RouterMetrics
    nodes: asyncio.Task[None]
    readiness: asyncio.Task[None]

    async def drain(self, longest_s: float, hurry: asyncio.Event) -> None:
        """Drain the router: accept no new requests and let live ones finish.

        Requests that have not finished after `longest_s`, or when `hurry` is set, end with
        UNAVAILABLE. If other processes listen on the same ports, new connections go to them, and
        requests on existing connections of this process are served. Otherwise new requests are
        rejected.
        """
        self.readiness.cancel()
        await self.health.tell(False)
        log.info("draining %s", kv(live=self.admission.num_live, longest_s=longest_s))
        if self.shares_port:
            self.admission.leave()
            self.http.stop_listening()
            stopping = asyncio.create_task(rpc.stop(self.server, longest_s))
            await _first_of(self._all_is_served(), hurry.wait(), longest_s)
            stopping.cancel()
        self.admission.close()
        self.http.drain()
        await _first_of(self.admission.wait_until_none_live(), hurry.wait(), longest_s)
        self.nodes.cancel()  # a request ends with the stream of its node
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
    changed = asyncio.Event()  # set when the readiness may have changed
    served = served_model(
        model,
        config.reasoning_parser,
        config.tool_parser,
        config.images,
        config.tool_arguments,
    )
    counts = RouterMetrics()
    certificates = tls.certificates(config.server.tls, "--server.tls")
    for_nodes = tls.certificates(config.tls_to_nodes, "--node-tls")
    _tell_ends(counts.trust, certificates, for_nodes)
    identity = identity_of("router", _name(), config.server.secret_file, counts.trust.refused)
    asked = identity is not None or config.server.tls.mutual or config.tls_to_nodes.mutual
    exposure.check(config.server.host, asked=asked, insecure=config.server.insecure)
    clients = make_clients(config, counts)
    admission = RequestLimiter(
        config.max_concurrent_requests, longest_wait_s=config.clients.max_queue_wait_s
    )
    counts.waiting_from(lambda: admission.num_waiting)
    tracer = export.start(config.server, "baton-router", ratio=config.trace_sample_ratio)
    async with AsyncExitStack() as resources:
        resources.callback(served.prompts.close)
        if tracer is not None:
            resources.callback(tracer.close)
        cluster, survey, pooling, membership = await _make_cluster(
            config,
            served.tokenizer.hash,
            partial(rpc.make_channel, certificates=for_nodes, identity=identity),
            changed,
            counts,
        )
        timelines = TimelineRecorder(counts, tracer)
        records = RequestRecords(counts, timelines)
        pooler = Pooler(
            served,
            pooling,
            admission,
            records,
            budget_s=config.request_timeout_s,
            queue_share=config.max_queue_fraction,
        )
        generator = Dispatcher(
            served,
            cluster,
            admission,
            records,
            budget_s=config.request_timeout_s,
            queue_share=config.max_queue_fraction,
            priorities=PriorityLimits(
                config.clients.priority,
                low_values_first=config.clients.low_priority_values_first,
            ),
            tells_cached_tokens=not config.hide_cached_tokens,
        )
        answers = IdempotencyCache(generator, keep_s=config.idempotency_ttl_s)
        # Without decode nodes the router serves only embeddings and scores.
        serves = (lambda: pooling.ready) if not config.decode else (lambda: cluster.ready)
        unready = NOT_READY if config.decode else NO_PREFILL_NODE
        why_not_ready = partial(_why_not_ready, admission, serves, unready)
        others = await resources.enter_async_context(siblings(place.others))
        keeper = await resources.enter_async_context(siblings(place.keeper))
        state = LocalState(
            admission,
            _constants(config, model),
            why_not_ready,
            lambda: cluster.in_use,
            counts.request_counts,
        )
        resources.push_async_callback(_end, asyncio.create_task(state.recent.run()))
        own_plans = LocalPlans()
        plans = Plans(own_plans, others)
        report = ClusterReport(survey, MergedState(state, others, place.began), plans)
        own = LocalRequests(timelines)
        own_events = LocalEvents(timelines)
        own_moves = LocalMigrations(cluster)
        explainer = Explainer(own_events, others, NodeDescriber(survey))
        listed = RequestsEndpoint(own, others, explainer)
        counted = (
            MergedMetricsEndpoint(keeper) if place.is_shared else MetricsEndpoint(counts.registry)
        )
        vectors = PoolingService(
            pooler,
            model.pooling,
            way=config.pooling_type,
            reranker=qwen3(served.tokenizer) if config.reranker == "qwen3" else None,
            has_nodes=bool(config.prefill),
        )
        model_names = ModelNames(config.served_model_name or model.name, cluster.adapters.by_name)
        adapters = AdapterCalls(survey, cluster, model_names.served)
        engines = EngineCalls(survey)
        service = InferenceService(
            clients.guard,
            answers,
            vectors,
            report,
            explainer,
            adapters,
            engines,
            MigrationService(own_moves, others),
            plans,
            served,
            SharedEnd(keeper) if place.is_shared else LocalEnd(on_drain),
            budget_s=config.request_timeout_s,
        )
        callers = CallerResolver(clients.guard)
        server = rpc.make_server(
            shares_port=place.is_shared, max_message_bytes=served.limits.message_bytes
        )
        names = rpc.add_service(
            server,
            router_pb2_grpc.add_RouterServicer_to_server,
            service,
            callers,
            max_fields=MAX_FIELDS,
        )
        health = rpc.add_health_and_reflection(server, names, callers)
        port = rpc.bind(
            server,
            config.server.host,
            config.server.port,
            certificates,
            shares_port=place.is_shared,
        )
        metrics_port = resources.enter_context(
            served_metrics(counts.registry, config.server.host, config.server.metrics_port)
        )
        await health.tell(False)
        await resources.enter_async_context(
            rpc.serving_health(
                health, config.server.host, config.server.health_port, shares_port=place.is_shared
            )
        )
        http = make_http(
            config,
            served,
            model_names,
            clients,
            answers,
            vectors,
            counts,
            why_not_ready,
            certificates,
            {**AdaptersEndpoint(adapters).routes(), **EnginesEndpoint(engines).routes()},
            others={
                "/cluster": ClusterEndpoint(report),
                requests_endpoint.PATH: listed.all,
                metrics_endpoint.PATH: counted,
            },
            others_below={f"{requests_endpoint.PATH}/": listed.below},
        )
        tells = {
            **state.tells,
            **own.tells,
            **own_events.tells,
            **own_moves.tells,
            **own_plans.tells,
            **metrics_endpoint.telling(counts.registry),
        }
        await resources.enter_async_context(told(place, tells))
        begun = asyncio.create_task(membership.run())
        resources.push_async_callback(_end, begun)
        if place.again and config.decode:
            # Other processes listen as well. Until then, a client here would find no node.
            with suppress(TimeoutError):
                async with asyncio.timeout(FIRST_LOOK_S):
                    await cluster.until_first_ready()
        http_port = await http.start(
            config.server.host, config.http_port, shares_port=place.is_shared
        )
        resources.push_async_callback(http.stop, _LAST_WORDS_S)
        await server.start()
        host = config.server.host
        log.info(
            "listening %s",
            kv(
                address=f"{host}:{port}",
                http=f"{host}:{http_port}",
                tls=tls.kind(certificates),
                secret="off" if identity is None else "on",
                metrics_port=metrics_port,
                policy=config.policy,
                model=model.name,
            ),
        )
        async with asyncio.TaskGroup() as tasks:
            nodes = tasks.create_task(_followed(begun))
            readiness = tasks.create_task(_tell_readiness(serves, unready, changed, health, counts))
            keys = tasks.create_task(clients.keep_up())
            trimming = tasks.create_task(allocator.keep_trimming())
            try:
                yield RunningRouter(
                    port,
                    http_port,
                    http,
                    server,
                    place.is_shared,
                    health,
                    admission,
                    cluster,
                    counts,
                    nodes,
                    readiness,
                )
            finally:
                for task in (readiness, nodes, keys, trimming):
                    task.cancel()
                await rpc.stop(server, _LAST_WORDS_S)


async def _followed(task: asyncio.Task[None]) -> None:
    """Wait for a task. Cancelling this cancels the task."""
    await task


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


def _name() -> str:
    """Return the name of this router in the logs of nodes."""
    return f"router-{secrets.token_hex(4)}@{socket.gethostname()}"


def _tell_ends(
    trust: TrustMetrics, shown: tls.Certificates | None, to_nodes: tls.Certificates | None
) -> None:
    """Export the expiry of certificates as metrics."""
    if shown is not None:
        trust.certificate_ends("shown", partial(tls.shown_end, shown))
        trust.certificate_ends("authority", partial(tls.authority_end, shown))
    if to_nodes is not None:
        trust.certificate_ends("shown_to_nodes", partial(tls.shown_end, to_nodes))
        trust.certificate_ends("authority_of_nodes", partial(tls.authority_end, to_nodes))


async def _make_cluster(
    config: RouterConfig,
    tokenizer_hash: str,
    make_channel: Callable[[str], grpc.aio.Channel],
    changed: asyncio.Event,
    counts: RouterMetrics,
) -> tuple[Cluster, ClusterState, PoolingNodes, Membership]:
    """Make the parts that know nodes. `changed` is set whenever a node changes."""
    discovery = Discovery(config.prefill, config.decode)
    await discovery.start()
    load, prefixes = NodeLoad(), PrefixIndex()

    def reported(reports: Sequence[NodeReport]) -> None:
        counts.nodes(Counter((report.role, report.state) for report in reports))
        cluster.described(reports)

    survey = ClusterState(
        tokenizer_hash=tokenizer_hash,
        on_change=lambda: cluster.refresh(),
        on_reports=reported,
        on_role=lambda address, role: membership.has_role(address, role),
    )
    policy = make_policy(config.policy, load, prefixes)
    cluster = Cluster(survey, policy, load, PrefixHints(prefixes), on_change=changed.set)
    pooling = PoolingNodes(make_channel, survey.fit, survey.paused, policy, load, cluster.backlogs)
    membership = Membership(
        discovery,
        survey,
        cluster,
        make_channel,
        CacheWatch(prefixes) if config.policy in HEED_PREFIXES else None,
        pooling,
        budget_s=config.request_timeout_s,
        patience=LivenessLimits(config.suspect_after_s, config.dead_after_s),
        on_stream_lost=counts.stream_lost,
    )
    return cluster, survey, pooling, membership


def _constants(config: RouterConfig, model: ModelFiles) -> router_pb2.RouterState:
    """Return the constant part of a router's state."""
    return router_pb2.RouterState(
        version=VERSION,
        model=config.served_model_name or model.name,
        context_length=model.context_length,
        has_chat_template=model.chat_template is not None,
    )


def _why_not_ready(
    admission: RequestLimiter, serves: Callable[[], bool], unready: str
) -> str | None:
    if admission.leaving:
        return SHUTTING_DOWN
    return None if serves() else unready


async def _tell_readiness(
    serves: Callable[[], bool],
    unready: str,
    changed: asyncio.Event,
    health: rpc.Health,
    counts: RouterMetrics,
) -> None:
    told = False
    while True:
        await changed.wait()
        changed.clear()
        ready = serves()
        if ready and not told:
            log.info("ready")
        elif told and not ready:
            log.warning("not ready %s", kv(reason=unready))
        told = ready
        counts.ready(ready)
        await health.tell(ready)


async def _first_of(
    one: Coroutine[Any, Any, object], other: Coroutine[Any, Any, object], longest_s: float
) -> None:
    waits = {asyncio.create_task(one), asyncio.create_task(other)}
    _, pending = await asyncio.wait(waits, timeout=longest_s, return_when=asyncio.FIRST_COMPLETED)
    for wait in pending:
        wait.cancel()
