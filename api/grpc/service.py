"""Registration of the `Router` gRPC service, with the authentication of its callers."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeAlias
from urllib.parse import unquote

import grpc.aio

from api.admin.moves import MigrationService, Plans
from api.admin.requests_endpoint import Explainer
from api.admin.router_state import ClusterReport
from api.auth.client import Client
from api.auth.guard import ApiKeyGuard
from api.grpc.inference import InferenceService
from api.http_checks import METHODS
from api.requests.served_model import ByModel
from common import rpc
from common.errors import InvalidRequest
from protos import router_pb2 as pb
from protos import router_pb2_grpc
from router.cluster.engine_calls import AdapterCalls, EngineCalls
from router.workers import Drain

Method: TypeAlias = Callable[[Any], Awaitable[Any]]  # request to response


class AdminService:
    """Implements the operator methods of the service. They raise ServingError.

    Attributes:
        methods: handlers by method name.
    """

    def __init__(
        self,
        report: ClusterReport,
        explainer: Explainer,
        adapters: ByModel[AdapterCalls],
        engines: ByModel[EngineCalls],
        migrations: MigrationService,
        plans: ByModel[Plans],
        drain: Drain,
    ) -> None:
        self._engines = engines
        self._plans = plans
        self._end = drain
        self.methods: Mapping[str, Method] = {
            "GetCluster": lambda _: report.make(),
            "Explain": lambda request: explainer.explain(request.name),
            "LoadAdapter": lambda request: adapters.of(request.model).load(
                request.name, request.path
            ),
            "UnloadAdapter": lambda request: adapters.of(request.model).unload(request.name),
            "Pause": lambda request: engines.of(request.model).pause(request.mode),
            "Continue": lambda request: engines.of(request.model).resume(),
            "UpdateWeights": self._update_weights,
            "ReleaseMemory": lambda request: engines.of(request.model).release_memory(request.tags),
            "ResumeMemory": lambda request: engines.of(request.model).resume_memory(request.tags),
            "StartProfile": lambda request: engines.of(request.model).start_profile(
                request.num_steps
            ),
            "StopProfile": lambda request: engines.of(request.model).stop_profile(),
            "FlushCache": lambda request: engines.of(request.model).flush_caches(),
            "Drain": self._drain,
            "Move": lambda request: migrations.move(
                request.request_id, request.source, request.target
            ),
            "ReportPlan": self._take_plan,
        }

    async def _update_weights(self, request: pb.UpdateWeightsRequest) -> pb.UpdateWeightsResponse:
        engines = self._engines.of(request.model)
        if not request.from_node:
            return await engines.update_weights(request.path, abort=request.abort)
        if request.path:
            raise InvalidRequest("from_node: cannot be combined with a path")
        return await engines.take_weights(request.from_node, abort=request.abort)

    async def _drain(self, request: pb.DrainRouterRequest) -> pb.DrainRouterResponse:
        await self._end(request.in_turn)
        return pb.DrainRouterResponse()

    async def _take_plan(self, request: pb.ReportPlanRequest) -> pb.ReportPlanResponse:
        self._plans.of(request.plan.model).take(request.plan)
        return pb.ReportPlanResponse()


ROUTER_SERVICE = "baton.v1.Router"
_HEADER = "authorization"
# Methods for clients, served by the InferenceService of the request's model.
_MODEL_METHODS = ("Generate", "Embed", "Score", "ScoreTokens", "Tokenize", "Detokenize", "GetModel")


def add_router_service(
    server: grpc.aio.Server,
    inference: ByModel[InferenceService],
    admin: AdminService,
    callers: rpc.RpcGuard,
    *,
    max_fields: int,
) -> tuple[str, ...]:
    """Register the service. For Args and Returns see `rpc.add_service`."""
    servicer = SimpleNamespace(
        **{name: partial(_called, method) for name, method in admin.methods.items()},
        **{name: partial(_called_of, inference, name) for name in _MODEL_METHODS},
    )
    add = router_pb2_grpc.add_RouterServicer_to_server
    return rpc.add_service(server, add, servicer, callers, max_fields=max_fields)


async def _called(method: Method, request: Any, context: Any) -> Any:
    return await method(request)


async def _called_of(
    inference: ByModel[InferenceService], name: str, request: Any, context: Any
) -> Any:
    return await getattr(inference.of(request.model), name)(request, context)


class CallerResolver:
    """Guard of the service's methods and of reflection. Identifies callers as Clients."""

    def __init__(self, guard: ApiKeyGuard) -> None:
        self._guard = guard

    def of(self, method: str) -> rpc.Admit:
        """Return the guard of a method. Raises KeyError if the method has no access rule."""
        access = METHODS[method]

        async def admit(context: Any) -> Client:
            shown = authorization(context.invocation_metadata())
            return self._guard.identify(access, shown, address(context.peer()))

        return admit


def authorization(metadata: Iterable[tuple[str, Any]] | None) -> str:
    """Return the authorization in a call's metadata, like HTTP's header, or ""."""
    for name, value in metadata or ():
        if name == _HEADER and isinstance(value, str):
            return value
    return ""


def address(peer: str) -> str:
    """Return the address in gRPC's peer: ipv4:HOST:PORT or ipv6:[HOST]:PORT, percent-encoded."""
    kind, _, where = unquote(peer).partition(":")
    if kind in ("ipv4", "ipv6"):
        return where.rpartition(":")[0].strip("[]")
    return kind
