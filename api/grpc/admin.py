"""The methods of the `Router` gRPC service for operators."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from api.admin.cluster_report import ClusterReport
from api.admin.explain import Explainer
from api.admin.moves import MigrationService
from api.admin.plans import Plans
from common.errors import InvalidRequest
from protos import router_pb2 as pb
from router.cluster.adapter_calls import AdapterCalls
from router.cluster.engine_calls import EngineCalls
from router.workers.ends import OperatorEnds

Method: TypeAlias = Callable[[Any], Awaitable[Any]]  # from a request to its response


class AdminService:
    """The operator methods, for `add_router_service`. They raise ServingError.

    Attributes:
        methods: by name. Those that only pass on the fields of a request are one line each.
    """

    def __init__(
        self,
        report: ClusterReport,
        explainer: Explainer,
        adapters: AdapterCalls,
        engines: EngineCalls,
        migrations: MigrationService,
        plans: Plans,
        ends: OperatorEnds,
    ) -> None:
        self._engines = engines
        self._plans = plans
        self._ends = ends
        self.methods: Mapping[str, Method] = {
            "GetCluster": lambda _: report.make(),
            "Explain": lambda request: explainer.explain(request.name),
            "LoadAdapter": lambda request: adapters.load(request.name, request.path),
            "UnloadAdapter": lambda request: adapters.unload(request.name),
            "Pause": lambda request: engines.pause(request.mode),
            "Continue": lambda _: engines.resume(),
            "UpdateWeights": self._update_weights,
            "ReleaseMemory": lambda request: engines.release_memory(request.tags),
            "ResumeMemory": lambda request: engines.resume_memory(request.tags),
            "StartProfile": lambda request: engines.start_profile(request.num_steps),
            "StopProfile": lambda _: engines.stop_profile(),
            "FlushCache": lambda _: engines.flush_caches(),
            "Drain": self._drain,
            "Move": lambda request: migrations.move(
                request.request_id, request.source, request.target
            ),
            "TellPlan": self._take_plan,
        }

    async def _update_weights(self, request: pb.UpdateWeightsRequest) -> pb.UpdateWeightsResponse:
        if not request.from_node:
            return await self._engines.update_weights(request.path, abort=request.abort)
        if request.path:
            raise InvalidRequest("from_node: not together with a path")
        return await self._engines.take_weights(request.from_node, abort=request.abort)

    async def _drain(self, request: pb.DrainRouterRequest) -> pb.DrainRouterResponse:
        await self._ends.drain(in_turn=request.in_turn)
        return pb.DrainRouterResponse()

    async def _take_plan(self, request: pb.TellPlanRequest) -> pb.TellPlanResponse:
        self._plans.take(request.plan)
        return pb.TellPlanResponse()
