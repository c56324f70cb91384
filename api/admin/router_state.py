"""State of a router, merged over its worker processes: GET /cluster, GetCluster, GET /metrics."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from itertools import chain
from typing import Any, NamedTuple

import msgspec
from aiohttp import web
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import choose_encoder

from api.admin.moves import Plans
from api.dialect.problems import ApiError
from api.generation import RequestLimiter
from api.http.messages import Handler, HttpRequest, whole
from common import VERSION
from common.distribution import HistogramCounts
from protos import router_pb2
from protos.router_pb2 import LatencySummary, ModelState, RouterState, WorkerState
from protos.router_pb2 import RecentRequests as RecentRequestsReport
from router.cluster.cluster_state import ClusterState, NodeReport
from router.metrics import LATENCY_S, RecentRequests, RequestCounts
from router.workers import OtherProcesses, ProcessHandler, ProcessQuery

STATE = "/worker-state"  # path between worker processes
_BY_WEIGHT = ("ready", "not ready", "draining")


class ModelReport(NamedTuple):
    """One served model as MergedState reports it.

    Attributes:
        constant: fields that never change.
        why_not_ready: returns a sentence, or None if a request could be placed now.
        in_use: returns addresses of the nodes that get requests.
    """

    constant: ModelState
    admission: RequestLimiter
    why_not_ready: Callable[[], str | None]
    in_use: Callable[[], Iterable[str]]

    def state(self) -> ModelState:
        reason = self.why_not_ready()
        state = ModelState(
            state=_state(reason, self.admission.leaving),
            reason=reason or "",
            live_requests=self.admission.num_live,
            max_requests=self.admission.max_requests,
        )
        state.MergeFrom(self.constant)
        return state


class MergedState:
    """State of this process, and of all worker processes together. For one event loop.

    Attributes:
        recent: requests of this process in the last minute. The caller runs it.

    Args:
        counts: returns the counts of all requests since the process started.
        began: start time of the router, by time.monotonic().
    """

    def __init__(
        self,
        models: Sequence[ModelReport],
        counts: Callable[[], RequestCounts],
        other_processes: OtherProcesses,
        began: float,
    ) -> None:
        self.began = began
        self.recent = RecentRequests(counts)
        self._models = models
        self._counts = counts
        self._process_began = time.monotonic()
        self._query = ProcessQuery(other_processes, STATE, self.own, WorkerState)

    async def now(self) -> RouterState:
        replies = await self._query.ask()
        whole = together([self.own(), *replies.answers])
        whole.uptime_s = time.monotonic() - self.began
        whole.processes = replies.num_others + 1
        whole.silent_processes = replies.num_silent
        return whole

    def own(self) -> WorkerState:
        total = self._counts()
        models = [each.state() for each in self._models]
        state = RouterState(
            version=VERSION,
            model=", ".join(each.name for each in models),
            models=models,
            context_length=max(each.context_length for each in models),
            has_chat_template=any(each.has_chat_template for each in models),
            oldest_process_s=time.monotonic() - self._process_began,
            in_use=chain.from_iterable(each.in_use() for each in self._models),
            rejected_requests=total.rejected,
            failed_requests=total.failed,
        )
        _sum_up(state)
        window_s, recent = self.recent.now()
        return WorkerState(
            state=state,
            window_s=window_s,
            rejected_requests=recent.rejected,
            failed_requests=recent.failed,
            ttft=recent.ttft.counts,
            itl=recent.itl.counts,
        )


def _sum_up(router: RouterState) -> None:
    """Set the router's fields that are computed from its models."""
    best = min(router.models, key=lambda one: _BY_WEIGHT.index(one.state))
    router.state, router.reason = best.state, best.reason
    router.live_requests = sum(each.live_requests for each in router.models)
    router.max_requests = sum(each.max_requests for each in router.models)


def together(workers: Sequence[WorkerState]) -> RouterState:
    """Merge the states of the worker processes.

    A model is as ready as in its least ready process, because any process may get a request. Only
    nodes that all processes use count as in use.
    """
    states = [worker.state for worker in workers]
    whole = RouterState()
    whole.CopyFrom(states[0])
    of_each_model = zip(*(state.models for state in states), strict=True)
    whole.ClearField("models")
    whole.models.extend(map(_model, of_each_model))
    _sum_up(whole)
    whole.oldest_process_s = max(one.oldest_process_s for one in states)
    whole.in_use[:] = sorted(frozenset.intersection(*(frozenset(one.in_use) for one in states)))
    whole.rejected_requests = sum(one.rejected_requests for one in states)
    whole.failed_requests = sum(one.failed_requests for one in states)
    whole.recent.CopyFrom(_recent(workers))
    return whole


def _model(states: Sequence[ModelState]) -> ModelState:
    """Merge the states of one model in all processes."""
    worst = max(states, key=lambda one: _BY_WEIGHT.index(one.state))
    alike = sum(one.state == worst.state for one in states)
    whole = ModelState()
    whole.CopyFrom(worst)
    if worst.reason and alike < len(states):
        whole.reason = f"{alike} of {len(states)} processes: {worst.reason}"
    whole.live_requests = sum(one.live_requests for one in states)
    whole.max_requests = sum(one.max_requests for one in states)
    return whole


def _recent(workers: Sequence[WorkerState]) -> RecentRequestsReport:
    counts = reduce(RequestCounts.plus, map(_counts, workers))
    return RecentRequestsReport(
        window_s=max(worker.window_s for worker in workers),
        rejected_requests=counts.rejected,
        failed_requests=counts.failed,
        ttft=_summary(counts.ttft),
        itl=_summary(counts.itl),
    )


def _counts(worker: WorkerState) -> RequestCounts:
    return RequestCounts(
        worker.rejected_requests,
        worker.failed_requests,
        HistogramCounts(LATENCY_S, tuple(worker.ttft), 0.0),
        HistogramCounts(LATENCY_S, tuple(worker.itl), 0.0),
    )


def _summary(latency: HistogramCounts) -> LatencySummary:
    return LatencySummary(
        count=latency.count, p50_s=latency.quantile(0.5), p99_s=latency.quantile(0.99)
    )


def _state(reason: str | None, leaving: bool) -> str:
    if leaving:
        return "draining"
    return "ready" if reason is None else "not ready"


REUSE_S = 0.25


# The protobuf message is the single definition. The JSON is derived from it, field by field.
class ClusterReport:
    """Builds the cluster report from the router, all nodes and planners. For one event loop.

    Args:
        models: nodes and planner reports of each model by name.
    """

    def __init__(
        self, models: Mapping[str, tuple[ClusterState, Plans]], router: MergedState
    ) -> None:
        self._models = models
        self._router = router

    async def make(self) -> router_pb2.GetClusterResponse:
        """Query all nodes and the other worker processes, within 2 s."""
        states, plans = zip(*self._models.values(), strict=True)
        reports, plans, router = await asyncio.gather(
            asyncio.gather(*(state.survey() for state in states)),
            asyncio.gather(*(each.now() for each in plans)),
            self._router.now(),
        )
        began = self._router.began
        for name, plan in zip(self._models, plans, strict=True):
            plan.model = name
        return router_pb2.GetClusterResponse(
            nodes=[
                _node(name, report, report.at - began)
                for name, of_model in zip(self._models, reports, strict=True)
                for report in of_model
            ],
            router=router,
            plan=plans[0],
            plans=[plan for plan in plans if plan.pressures] if len(plans) > 1 else (),
        )


class ClusterEndpoint:
    """HTTP handler for GET /cluster.

    A response may be up to `REUSE_S` seconds old, so that more viewers do not cause more queries.
    """

    def __init__(self, report: ClusterReport) -> None:
        self._report = report
        self._making: asyncio.Task[bytes] | None = None
        self._made_at = 0.0

    async def __call__(self, request: HttpRequest) -> web.Response:
        making = self._making
        if making is None or (making.done() and time.monotonic() > self._made_at + REUSE_S):
            making = self._making = asyncio.create_task(self._make())
        # A viewer that disconnects must not cancel the query that other viewers share.
        body = await asyncio.shield(making)
        return whole(200, body, headers=(("cache-control", "no-store"),))

    async def _make(self) -> bytes:
        body = msgspec.json.encode(plain(await self._report.make()))
        self._made_at = time.monotonic()
        return body


def plain(message: Message) -> dict[str, Any]:
    """Return every field under its own name, including unset ones.

    Counts are JSON numbers, where protobuf's own JSON uses strings. A fixed64 field is an id and
    stays a string, because JavaScript would round the number. Bytes are hexadecimal.
    """
    fields: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is None:
            if field.is_repeated:
                value = list(value)
            elif field.type == FieldDescriptor.TYPE_FIXED64:
                value = str(value)
            elif field.type == FieldDescriptor.TYPE_BYTES:
                value = value.hex()
        elif field.message_type.GetOptions().map_entry:
            value = dict(value)
        elif field.is_repeated:
            value = [plain(each) for each in value]
        else:
            value = plain(value)
        fields[field.name] = value
    return fields


# Fields of a node's description that the report repeats under the same names.
_DESCRIBED = (
    *("instance_id", "pids", "pages", "links", "ranks", "group", "group_rank", "queues"),
    *("counters", "steps", "model", "mode", "context_length", "weights", "prompts"),
)


def _node(served: str, report: NodeReport, seen_s: float) -> router_pb2.ClusterNode:
    described: dict[str, Any] = {}
    if report.description is not None:
        described = {name: getattr(report.description, name) for name in _DESCRIBED}
    return router_pb2.ClusterNode(
        role=report.role,
        address=report.address,
        state=report.state,
        seen_s=seen_s,
        served_model=served,
        **described,
    )


METRICS_PATH = "/metrics"  # also the path between worker processes


def metrics_handlers(registry: CollectorRegistry) -> Mapping[str, ProcessHandler]:
    """Return the handler through which other worker processes fetch this one's metrics as text."""

    async def handle(_: Mapping[str, str]) -> bytes:
        return generate_latest(registry)

    return {METRICS_PATH: handle}


def metrics_endpoint(registry: CollectorRegistry) -> Handler:
    """Return the HTTP handler for the metrics of one process."""

    async def serve(request: HttpRequest) -> web.Response:
        encode, kind = choose_encoder(request.header("accept"))
        return whole(200, encode(registry), kind)

    return serve


def merged_metrics_endpoint(keeper: OtherProcesses) -> Handler:
    """Return the HTTP handler for the metrics of a router with several processes."""

    async def serve(request: HttpRequest) -> web.Response:
        accept = request.header("accept")
        replies = await keeper.ask(METRICS_PATH, accept=accept)
        if replies.num_silent:
            sentence = "the process that collects this router's metrics did not respond in time"
            return ApiError(503, sentence).response()
        (body,) = replies.answers
        return whole(200, body, choose_encoder(accept)[1])

    return serve
