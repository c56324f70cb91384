"""Construction of the parts that a router's models share, and of each model's pool of nodes."""

import asyncio
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import grpc.aio

from api.auth.guard import ApiKeyGuard, ApiKeys
from api.dialect.models import ModelNames
from api.generation import Dispatcher, PriorityLimits, RequestLimiter, TimeBudget
from api.http_checks import AllowedHosts, Cors
from api.idempotency import MAX_BYTES, IdempotencyCache
from api.pooling.pooler import Pooler
from api.pooling.vectors import PoolingService, qwen3
from api.requests.served_model import ServedModel, served_model
from api.text.model_files import ModelFiles
from common import rpc, tls
from common.config import RouterConfig
from common.identity import program
from common.identity.program import identity_of, is_loopback
from common.identity.secret import keyrings
from common.logs import kv
from common.metrics.program import TrustMetrics
from common.tracing import context
from common.tracing.context import Tracer
from router.cluster.cluster import NOT_READY, SHUTTING_DOWN, Cluster
from router.cluster.cluster_state import ClusterState
from router.cluster.decode_client import LivenessLimits
from router.cluster.membership import Membership
from router.cluster.pooling_nodes import NO_PREFILL_NODE, PoolingNodes
from router.cluster.sources import Discovery
from router.metrics import RouterMetrics
from router.policy.load import NodeBacklogs, NodeLoad
from router.policy.policies import USE_PREFIX_INDEX, make_policy
from router.policy.prefix_index import CacheWatch, PrefixIndex
from router.record import RequestRecords

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Clients:
    """Authentication and limits of clients.

    Attributes:
        has_secret: the router has the cluster secret.
    """

    guard: ApiKeyGuard
    keyring: ApiKeys | None
    hosts: AllowedHosts
    cors: Cors
    has_secret: bool

    async def keep_up(self) -> None:
        """Watch the file of keys, if there is one. Never returns."""
        if self.keyring is not None:
            await self.keyring.watch()


def make_clients(config: RouterConfig, metrics: RouterMetrics) -> Clients:
    """Make the guard, keyring, host check and CORS rules.

    Raises:
        ConfigError: the file of API keys, or of the cluster secret, cannot be used.
    """
    host = config.server.host
    here_only = is_loopback(host)
    file = config.clients.api_keys
    keyring = ApiKeys(file, salt_by_key=config.clients.isolate_cache_by_key) if file else None
    if keyring is not None:
        metrics.keys_from(keyring.usage)
    elif not here_only:
        log.warning("clients need no API key: --api-keys is not set %s", kv(host=host))
    held = keyrings(config.server.secret_file, "router")
    operators_prove = not (here_only or config.server.insecure)
    return Clients(
        guard=ApiKeyGuard(keyring, held, metrics, operators_prove=operators_prove),
        keyring=keyring,
        hosts=AllowedHosts(host, config.clients.allowed_hosts),
        cors=Cors(config.clients.cors_origins),
        has_secret=held is not None,
    )


@dataclass(frozen=True, slots=True)
class RouterBase:
    """The parts of a router that all models share.

    Attributes:
        certificates: certificates of the ports for clients. None: no TLS.
        tracer: None: requests are not traced.
        make_channel: opens a channel to the node at an address.
    """

    config: RouterConfig
    metrics: RouterMetrics
    clients: Clients
    certificates: tls.Certificates | None
    tracer: Tracer | None
    make_channel: Callable[[str], grpc.aio.Channel]


def make_base(config: RouterConfig, resources: ExitStack) -> RouterBase:
    """Make the parts that all models share.

    Args:
        resources: closes them.

    Raises:
        ConfigError: the secret, keys or certificates cannot be used.
    """
    metrics = RouterMetrics()
    certificates = tls.certificates(config.server.tls, "--server.tls")
    for_nodes = tls.certificates(config.tls_to_nodes, "--node-tls")
    _report_expiry(metrics.trust, certificates, for_nodes)
    name = f"router-{secrets.token_hex(4)}@{socket.gethostname()}"  # shown in the logs of nodes
    identity = identity_of("router", name, config.server.secret_file, metrics.trust.refused)
    authenticated = identity is not None or config.server.tls.mutual or config.tls_to_nodes.mutual
    program.check_exposure(
        config.server.host, authenticated=authenticated, insecure=config.server.insecure
    )
    clients = make_clients(config, metrics)
    tracer = context.start(config.server, "baton-router", ratio=config.trace_sample_ratio)
    if tracer is not None:
        resources.callback(tracer.close)
    make_channel = partial(rpc.make_channel, certificates=for_nodes, identity=identity)
    return RouterBase(config, metrics, clients, certificates, tracer, make_channel)


def _report_expiry(
    trust: TrustMetrics, shown: tls.Certificates | None, to_nodes: tls.Certificates | None
) -> None:
    """Export the expiry of certificates as metrics."""
    if shown is not None:
        trust.certificate_ends("shown", partial(tls.shown_end, shown))
        trust.certificate_ends("authority", partial(tls.authority_end, shown))
    if to_nodes is not None:
        trust.certificate_ends("shown_to_nodes", partial(tls.shown_end, to_nodes))
        trust.certificate_ends("authority_of_nodes", partial(tls.authority_end, to_nodes))


@dataclass(frozen=True, slots=True)
class ModelPool:
    """One served model: its nodes, and the parts that serve its requests.

    Attributes:
        name: name by which clients request it.
        config: the router's configuration, with the values of this model.
        metrics: metrics of its requests and nodes. The router's own if this is the only model.
        admission: limit of its requests, so that one model never takes another one's slots.
        changed: set when `ready` may have changed.
        names: model names that clients may use.
    """

    name: str
    config: RouterConfig
    model: ServedModel
    metrics: RouterMetrics
    records: RequestRecords
    admission: RequestLimiter
    state: ClusterState
    cluster: Cluster
    pooling: PoolingNodes
    membership: Membership
    changed: asyncio.Event
    idempotency: IdempotencyCache
    pooling_service: PoolingService
    names: ModelNames

    @property
    def generates(self) -> bool:
        """False: there are no decode nodes, and the model serves only embeddings and scores."""
        return bool(self.config.decode)

    @property
    def ready(self) -> bool:
        """Return whether a request could be placed."""
        return self.cluster.ready if self.generates else self.pooling.ready

    def why_not_ready(self) -> str | None:
        """Return why new requests are rejected, or None if one could be placed now."""
        if self.admission.leaving:
            return SHUTTING_DOWN
        return None if self.ready else self._unready

    async def report_readiness(self, on_change: Callable[[], Awaitable[None]]) -> None:
        """Report every change to the log, the metrics and `on_change`, until cancelled."""
        was_ready = False
        while True:
            await self.changed.wait()
            self.changed.clear()
            ready = self.ready
            if ready and not was_ready:
                log.info("ready %s", kv(model=self.name))
            elif was_ready and not ready:
                log.warning("not ready %s", kv(model=self.name, reason=self._unready))
            was_ready = ready
            self.metrics.ready(ready)
            await on_change()

    @property
    def _unready(self) -> str:
        return NOT_READY if self.generates else NO_PREFILL_NODE


async def make_pool(
    base: RouterBase, config: RouterConfig, files: ModelFiles, resources: ExitStack
) -> ModelPool:
    """Make the pool of one model.

    Args:
        config: the router's configuration, with the values of this model.
        resources: closes it.

    Raises:
        ConfigError: the tokenizer, the chat template or an entry of its nodes is invalid, or the
            model cannot make the configured vectors or scores.
    """
    model = served_model(
        files,
        config.reasoning_parser,
        config.tool_parser,
        config.images,
        config.tool_arguments,
    )
    resources.callback(model.prompts.close)
    name = config.served_model_name or files.name
    is_only = not base.config.models
    metrics = base.metrics if is_only else RouterMetrics()
    admission = RequestLimiter(
        config.max_concurrent_requests, longest_wait_s=config.clients.max_queue_wait_s
    )
    metrics.waiting_from(lambda: admission.num_waiting)
    records = RequestRecords(metrics, base.tracer, name)
    changed = asyncio.Event()
    nodes = await _make_nodes(base, config, model, metrics, changed, "" if is_only else name)
    budget = TimeBudget(config.request_timeout_s, config.max_queue_fraction)
    pooling_service = PoolingService(
        Pooler(model, nodes.pooling, admission, records, budget),
        files.pooling,
        way=config.pooling_type,
        reranker=qwen3(model.tokenizer) if config.reranker == "qwen3" else None,
        has_nodes=bool(config.prefill),
    )
    idempotency = IdempotencyCache(
        _dispatcher(config, model, nodes.cluster, admission, records, budget),
        keep_s=config.idempotency_ttl_s,
        max_bytes=MAX_BYTES // len(base.config.each_model),  # limit of all models together
    )
    return ModelPool(
        *(name, config, model, metrics, records, admission, *nodes),
        changed=changed,
        idempotency=idempotency,
        pooling_service=pooling_service,
        names=ModelNames(name, nodes.cluster.adapters.by_name),
    )


def _dispatcher(
    config: RouterConfig,
    model: ServedModel,
    cluster: Cluster,
    admission: RequestLimiter,
    records: RequestRecords,
    budget: TimeBudget,
) -> Dispatcher:
    return Dispatcher(
        model,
        cluster,
        admission,
        records,
        budget=budget,
        priorities=PriorityLimits(
            config.clients.priority,
            low_values_first=config.clients.low_priority_values_first,
        ),
        returns_cached_tokens=not config.hide_cached_tokens,
        stream_interval=config.stream_interval,
    )


class _Nodes(NamedTuple):
    """The parts of one served model that need its nodes, in the order of ModelPool."""

    state: ClusterState
    cluster: Cluster
    pooling: PoolingNodes
    membership: Membership


async def _make_nodes(
    base: RouterBase,
    config: RouterConfig,
    model: ServedModel,
    metrics: RouterMetrics,
    changed: asyncio.Event,
    served: str,
) -> _Nodes:
    """Make the parts of one model that need its nodes.

    Args:
        served: see Cluster.

    Raises:
        ConfigError: an entry of the model's nodes is invalid.
    """
    discovery = Discovery(config.prefill, config.decode, config.encode)
    await discovery.start()
    load, prefixes = NodeLoad(), PrefixIndex()
    backlogs = NodeBacklogs(load)

    state = ClusterState(
        tokenizer_hash=model.tokenizer.hash,
        other_models={each.model for each in base.config.models} - {config.model},
        on_stream_lost=metrics.stream_lost,
    )
    state.on_reports.append(metrics.nodes)
    policy = make_policy(config.policy, load, backlogs, prefixes)
    cluster = Cluster(
        *(state, policy, load, backlogs, prefixes, changed.set, served),
        fingerprint_change=config.fingerprint_change,
    )
    pooling = PoolingNodes(
        base.make_channel, state.fit, state.paused, policy, load, backlogs, served
    )
    membership = Membership(
        discovery,
        state,
        cluster,
        base.make_channel,
        CacheWatch(prefixes) if config.policy in USE_PREFIX_INDEX else None,
        pooling,
        budget_s=config.request_timeout_s,
        patience=LivenessLimits(config.suspect_after_s, config.dead_after_s),
    )
    return _Nodes(state, cluster, pooling, membership)


Pools: TypeAlias = Mapping[str, ModelPool]  # by served model
