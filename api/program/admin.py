"""Construction of the parts of a router that serve operators."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from api.admin import requests_endpoint
from api.admin.engines import AdaptersEndpoint, EnginesEndpoint
from api.admin.moves import MigrationService, Plans
from api.admin.requests_endpoint import Explainer, RequestsEndpoint
from api.admin.router_state import (
    METRICS_PATH,
    ClusterEndpoint,
    ClusterReport,
    MergedMetricsEndpoint,
    MergedState,
    MetricsEndpoint,
    metrics_handlers,
)
from api.dialect.generation_endpoint import ModelNames
from api.grpc.service import AdminService
from api.http.messages import Handler
from api.program.nodes import RouterNodes
from common import VERSION
from protos import router_pb2
from router.cluster.cluster_state import NodeDescriber
from router.cluster.engine_calls import AdapterCalls, EngineCalls
from router.metrics import RecentRequests
from router.workers import LocalEnd, OtherProcesses, ProcessSlot, SharedEnd


@dataclass(frozen=True, slots=True)
class AdminParts:
    """The parts of a router that serve operators.

    Attributes:
        service: the methods of the gRPC service.
        paths: HTTP handlers by path and method.
        paths_below: the same for every path that begins with this one.
        recent: must run.
    """

    service: AdminService
    paths: Mapping[str, Mapping[str, Handler]]
    paths_below: Mapping[str, Mapping[str, Handler]]
    recent: RecentRequests


def make_admin(
    nodes: RouterNodes,
    names: ModelNames,
    place: ProcessSlot,
    others: OtherProcesses,
    keeper: OtherProcesses,
    on_drain: Callable[[], None],
) -> AdminParts:
    """Make these parts. `others.handlers` then has the answers for the other processes.

    Args:
        others, keeper: the other processes of this router.
        on_drain: called when an operator drains a router with one process.
    """
    base, cluster = nodes.base, nodes.cluster
    registry, shared = base.metrics.registry, place.is_shared
    state = MergedState(
        base.admission,
        _constants(nodes),
        nodes.why_not_ready,
        lambda: cluster.in_use,
        base.metrics.request_counts,
        others,
        place.began,
    )
    plans = Plans(others)
    report = ClusterReport(nodes.state, state, plans)
    explainer = Explainer(base.timelines, others, NodeDescriber(nodes.state))
    listed = RequestsEndpoint(base.timelines, others, explainer)
    adapters = AdapterCalls(nodes.state, cluster, names.served)
    engines = EngineCalls(nodes.state)
    metrics = MergedMetricsEndpoint(keeper) if shared else MetricsEndpoint(registry)
    others.handlers.update(metrics_handlers(registry))
    return AdminParts(
        AdminService(
            report,
            explainer,
            adapters,
            engines,
            MigrationService(cluster, others),
            plans,
            SharedEnd(keeper) if shared else LocalEnd(on_drain),
        ),
        {
            **AdaptersEndpoint(adapters).routes(),
            **EnginesEndpoint(engines).routes(),
            "/cluster": {"GET": ClusterEndpoint(report)},
            requests_endpoint.PATH: {"GET": listed.all},
            METRICS_PATH: {"GET": metrics},
        },
        {f"{requests_endpoint.PATH}/": {"GET": listed.below}},
        state.recent,
    )


def _constants(nodes: RouterNodes) -> router_pb2.RouterState:
    """Return the constant part of a router's state."""
    files = nodes.base.model.files
    return router_pb2.RouterState(
        version=VERSION,
        model=nodes.base.config.served_model_name or files.name,
        context_length=files.context_length,
        has_chat_template=files.chat_template is not None,
    )
