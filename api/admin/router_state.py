"""The state of a router, merged over all of its processes."""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import reduce

from api.requests.limiter import RequestLimiter
from common.distribution import HistogramCounts
from protos.router_pb2 import LatencySummary, RouterState, WorkerState
from protos.router_pb2 import RecentRequests as RecentRequestsReport
from router.metrics import LATENCY_S
from router.recent_requests import RecentRequests, RequestCounts
from router.workers.asking import SiblingProcesses, SiblingQuery, as_message

STATE = "/worker-state"  # path between worker processes
_BY_WEIGHT = ("ready", "not ready", "draining")


class MergedState:
    """State of all processes of this router. For one event loop.

    Attributes:
        recent: requests of this process in the last minute. Must run.
    """

    def __init__(
        self,
        admission: RequestLimiter,
        constant: RouterState,
        why_not_ready: Callable[[], str | None],
        in_use: Callable[[], Iterable[str]],
        counts: Callable[[], RequestCounts],
        siblings: SiblingProcesses,
        began: float,
    ) -> None:
        """
        Args:
            constant: fields that never change.
            why_not_ready: returns a sentence, or None if a request could be placed now.
            in_use: returns addresses of nodes that requests are sent to.
            counts: returns the counts of requests since the process started.
            began: start time of the router, by time.monotonic().
        """
        self.began = began
        self.recent = RecentRequests(counts)
        self._admission = admission
        self._process_began = time.monotonic()
        self._constant = constant
        self._why_not_ready = why_not_ready
        self._in_use = in_use
        self._counts = counts
        self._query = SiblingQuery(siblings, STATE, self.own, as_message(WorkerState))

    async def now(self) -> RouterState:
        told = await self._query.ask()
        whole = together([self.own(), *told.answers])
        whole.uptime_s = time.monotonic() - self.began
        whole.processes = told.num_asked + 1
        whole.silent_processes = told.num_silent
        return whole

    def own(self) -> WorkerState:
        """Return the state of this process."""
        reason = self._why_not_ready()
        total = self._counts()
        state = RouterState(
            state=_state(reason, self._admission.leaving),
            reason=reason or "",
            live_requests=self._admission.num_live,
            max_requests=self._admission.max_requests,
            oldest_process_s=time.monotonic() - self._process_began,
            in_use=self._in_use(),
            rejected_requests=total.rejected,
            failed_requests=total.failed,
        )
        state.MergeFrom(self._constant)
        window_s, recent = self.recent.now()
        return WorkerState(
            state=state,
            window_s=window_s,
            rejected_requests=recent.rejected,
            failed_requests=recent.failed,
            ttft=recent.ttft.counts,
            itl=recent.itl.counts,
        )


def together(workers: Sequence[WorkerState]) -> RouterState:
    """Merge the states of the processes.

    The router is as ready as its least ready process, because any process may get a request. It
    uses the nodes that all processes use.
    """
    states = [worker.state for worker in workers]
    worst = max(states, key=lambda one: _BY_WEIGHT.index(one.state))
    alike = sum(one.state == worst.state for one in states)
    whole = RouterState()
    whole.CopyFrom(worst)
    if worst.reason and alike < len(states):
        whole.reason = f"{alike} of {len(states)} processes: {worst.reason}"
    whole.live_requests = sum(one.live_requests for one in states)
    whole.max_requests = sum(one.max_requests for one in states)
    whole.oldest_process_s = max(one.oldest_process_s for one in states)
    whole.in_use[:] = sorted(frozenset.intersection(*(frozenset(one.in_use) for one in states)))
    whole.rejected_requests = sum(one.rejected_requests for one in states)
    whole.failed_requests = sum(one.failed_requests for one in states)
    whole.recent.CopyFrom(_recent(workers))
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
