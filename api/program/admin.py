"""Construction of the parts of a router that serve operators."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce

from prometheus_client import CollectorRegistry

from api.admin import engines as commands
from api.admin import requests_endpoint
from api.admin.moves import MigrationService, Plans
from api.admin.requests_endpoint import Explainer, RequestFinder, RequestsEndpoint
from api.admin.router_state import (
    METRICS_PATH,
    ClusterEndpoint,
    ClusterReport,
    MergedState,
    ModelReport,
    merged_metrics_endpoint,
    metrics_endpoint,
    metrics_handlers,
)
from api.grpc.service import Method, admin_methods, model_methods
from api.http.messages import Handler
from api.program.nodes import ModelPool, Pools, RouterBase
from api.requests.served_model import ByModel
from protos.router_pb2 import ModelState
from router.cluster.cluster_state import NodeDescriber
from router.cluster.engine_calls import AdapterCalls, EngineCalls
from router.metrics import RecentRequests, RequestCounts
from router.record import AllTimelines
from router.workers import OtherProcesses, ProcessSlot, local_drain, shared_drain


@dataclass(frozen=True, slots=True)
class AdminParts:
    """The parts of a router that serve operators.

    Attributes:
        methods: methods of the gRPC service by name.
        paths: HTTP handlers by path and method.
        paths_below: the same for all paths that begin with a key.
        recent: counts of recent requests. The caller runs it.
    """

    methods: Mapping[str, Method]
    paths: Mapping[str, Mapping[str, Handler]]
    paths_below: Mapping[str, Mapping[str, Handler]]
    recent: RecentRequests


def make_admin(
    base: RouterBase,
    pools: Pools,
    registry: CollectorRegistry,
    place: ProcessSlot,
    others: OtherProcesses,
    keeper: OtherProcesses,
    on_drain: Callable[[], None],
) -> AdminParts:
    """Make the operators' parts, and register this process's answers in `others.handlers`.

    Args:
        registry: the router's metrics.
        others, keeper: clients of the other worker processes, and of their parent process.
        on_drain: called when an operator drains a router with one process.
    """
    shared = place.is_shared
    states = [pool.state for pool in pools.values()]
    of_requests = {base.metrics, *(pool.metrics for pool in pools.values())}
    state = MergedState(
        list(map(_report, pools.values())),
        lambda: reduce(RequestCounts.plus, (each.request_counts() for each in of_requests)),
        others,
        place.began,
    )
    plans = {name: Plans(others, number=number) for number, name in enumerate(pools)}
    report = ClusterReport({name: (pool.state, plans[name]) for name, pool in pools.items()}, state)
    timelines = AllTimelines([pool.records for pool in pools.values()])
    finder = RequestFinder(timelines, others)
    explainer = Explainer(finder, NodeDescriber(states))
    listed = RequestsEndpoint(timelines, others, finder, explainer)
    adapters = ByModel(
        {
            name: AdapterCalls(pool.state, pool.cluster, frozenset(pools))
            for name, pool in pools.items()
        }
    )
    engines = ByModel({name: EngineCalls(pool.state) for name, pool in pools.items()})
    of_models = model_methods(engines, adapters)
    metrics = merged_metrics_endpoint(keeper) if shared else metrics_endpoint(registry)
    others.handlers.update(metrics_handlers(registry))
    return AdminParts(
        admin_methods(
            report,
            explainer,
            of_models,
            MigrationService([pool.cluster for pool in pools.values()], others),
            ByModel(plans),
            shared_drain(keeper) if shared else local_drain(on_drain),
        ),
        {
            **commands.routes(of_models),
            "/cluster": {"GET": ClusterEndpoint(report)},
            requests_endpoint.PATH: {"GET": listed.all},
            METRICS_PATH: {"GET": metrics},
        },
        {f"{requests_endpoint.PATH}/": {"GET": listed.below}},
        state.recent,
    )


def _report(pool: ModelPool) -> ModelReport:
    files = pool.model.files
    constant = ModelState(
        name=pool.name,
        context_length=files.context_length,
        has_chat_template=files.chat_template is not None,
    )
    return ModelReport(constant, pool.admission, pool.why_not_ready, lambda: pool.cluster.in_use)
