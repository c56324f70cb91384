"""Registration of the `Router` gRPC service, with the authentication of its callers."""

from collections.abc import Awaitable, Callable, Mapping
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
from api.grpc.inference import InferenceService, metadata
from api.http_checks import METHODS
from api.requests.served_model import ByModel
from common import rpc
from protos import router_pb2 as pb
from protos import router_pb2_grpc
from router.cluster.engine_calls import AdapterCalls, EngineCalls
from router.workers import Drain

Method: TypeAlias = Callable[[Any], Awaitable[Any]]  # request to response

# Operator methods for the nodes of one model, by name.
_ENGINES: Mapping[str, Any] = {
    "Pause": EngineCalls.pause,
    "Continue": EngineCalls.resume,
    "UpdateWeights": EngineCalls.update_weights,
    "ReleaseMemory": EngineCalls.release_memory,
    "ResumeMemory": EngineCalls.resume_memory,
    "StartProfile": EngineCalls.start_profile,
    "StopProfile": EngineCalls.stop_profile,
    "FlushCache": EngineCalls.flush_caches,
}
_ADAPTERS: Mapping[str, Any] = {
    "LoadAdapter": AdapterCalls.load,
    "UnloadAdapter": AdapterCalls.unload,
}


def model_methods(
    engines: ByModel[EngineCalls], adapters: ByModel[AdapterCalls]
) -> Mapping[str, Method]:
    """Return the operator methods that concern the nodes of one model, by name."""

    async def call(parts: ByModel[Any], method: Any, request: Any) -> Any:
        return await method(parts.of(request.model), request)

    return {
        **{name: partial(call, engines, method) for name, method in _ENGINES.items()},
        **{name: partial(call, adapters, method) for name, method in _ADAPTERS.items()},
    }


def admin_methods(
    report: ClusterReport,
    explainer: Explainer,
    of_models: Mapping[str, Method],
    migrations: MigrationService,
    plans: ByModel[Plans],
    drain: Drain,
) -> Mapping[str, Method]:
    """Return the operator methods of the service by name. They raise ServingError.

    Args:
        of_models: see `model_methods`.
    """

    async def end(request: pb.DrainRouterRequest) -> pb.DrainRouterResponse:
        await drain(request.in_turn)
        return pb.DrainRouterResponse()

    async def take_plan(request: pb.ReportPlanRequest) -> pb.ReportPlanResponse:
        plans.of(request.plan.model).take(request.plan)
        return pb.ReportPlanResponse()

    return {
        **of_models,
        "GetCluster": lambda _: report.make(),
        "Explain": lambda request: explainer.explain(request.name),
        "Move": lambda request: migrations.move(request.request_id, request.source, request.target),
        "Drain": end,
        "ReportPlan": take_plan,
    }


ROUTER_SERVICE = "baton.v1.Router"
_HEADER = "authorization"
# Methods for clients, served by the InferenceService of the request's model.
_MODEL_METHODS = ("Generate", "Embed", "Score", "ScoreTokens", "Tokenize", "Detokenize", "GetModel")


def add_router_service(
    server: grpc.aio.Server,
    inference: ByModel[InferenceService],
    admin: Mapping[str, Method],
    callers: rpc.RpcGuard,
    *,
    max_fields: int,
) -> tuple[str, ...]:
    """Register the service. For Args and Returns see `rpc.add_service`."""
    servicer = SimpleNamespace(
        **{name: partial(_called, method) for name, method in admin.items()},
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
            shown = metadata(context, _HEADER)
            return self._guard.identify(access, shown, address(context.peer()))

        return admit


def address(peer: str) -> str:
    """Return the address in gRPC's peer: ipv4:HOST:PORT or ipv6:[HOST]:PORT, percent-encoded."""
    kind, _, where = unquote(peer).partition(":")
    if kind in ("ipv4", "ipv6"):
        return where.rpartition(":")[0].strip("[]")
    return kind
