"""The control interface of an engine: calls of the `Node` service, reports, watchers of the prefix
cache, and drains. An engine sends its frontend everything but tokens through this module.

EngineControl advances the commands in progress, uses the role through the protocol ControlledRole,
and knows no queue by name. Changes of the prefix cache are sent to the watchers (Node.WatchCache)
once per step. A new watcher first gets a snapshot, and changes only after that.
"""

import logging
import math
import time
from array import array
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from common.distribution import HistogramCounts
from common.errors import FailedPrecondition, ServingError
from common.logs import kv
from common.queueing import CLASSES
from common.requests.namespace import AdapterId, WeightsId
from engine.kv_cache.kv_events import CacheChange, CacheEvents, KvEventLog
from engine.loop.step_clock import StepClock
from kvtransfer.ports import ProducerUp
from node.control.commands import CommandSteps, ControlledRole
from node.messages import (
    AbortRequests,
    CacheEventBatch,
    Command,
    DescribeNode,
    Drained,
    DrainNode,
    EngineMessage,
    EngineStats,
    ExplainRequests,
    FlushCache,
    FrontMessage,
    KvEvents,
    LoadAdapter,
    NodeCall,
    NodeCallResult,
    PrepareRole,
    ResumeNode,
    StartRole,
    UnloadAdapter,
    WatchCache,
)

MAX_PAGES_PER_MESSAGE = 1 << 15
# Seconds between two snapshots for new watchers, because a snapshot is long.
BEGIN_INTERVAL_S = 0.25


class CacheReports:
    """Sends cache changes to the watchers, and KV events. Engine thread only.

    Args:
        kv_events: None: none are published.
    """

    def __init__(
        self,
        cache: CacheEvents,
        post: Callable[[CacheEventBatch | KvEvents], None],
        kv_events: KvEventLog | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._post = post
        self._kv_events = kv_events
        self._now = now
        self._watchers: set[int] = set()
        self._newcomers: set[int] = set()
        self._begin_at = 0.0

    def watch(self, message: WatchCache) -> None:
        """Add or remove a watcher. Does nothing else, so that frequent calls do not delay steps."""
        if message.on:
            self._newcomers.add(message.watcher)
            return
        self._newcomers.discard(message.watcher)
        self._watchers.discard(message.watcher)
        if not self._watchers:
            self._cache.stop()

    def flush(self) -> None:
        """Send what is new: KV events, changes to watchers, and a snapshot to new watchers.

        Called once per turn of the engine loop. Cheap without watchers.
        """
        for payload in self._kv_events.take() if self._kv_events is not None else ():
            self._post(KvEvents(payload))
        if self._watchers:
            change = self._cache.take()
            if change is not None:
                self._report((), change)
        if self._newcomers and self._now() >= self._begin_at:
            self._begin()

    def _begin(self) -> None:
        """Send one snapshot to all new watchers. Later ones wait for the next interval."""
        if not self._watchers:
            self._cache.start()
        self._watchers |= self._newcomers
        self._report(tuple(self._newcomers), self._cache.everything())
        self._newcomers.clear()
        self._begin_at = self._now() + BEGIN_INTERVAL_S

    def _report(self, watchers: tuple[int, ...], change: CacheChange) -> None:
        """Send a change in as many messages as needed. No page is both stored and removed in it."""
        most = MAX_PAGES_PER_MESSAGE
        longest = max(len(change.stored), len(change.removed))
        for start in range(0, longest or 1, most):
            self._post(
                CacheEventBatch(
                    watchers,
                    self._cache.page_size,
                    change.cleared and not start,
                    array("Q", change.stored[start : start + most]).tobytes(),
                    array("Q", change.removed[start : start + most]).tobytes(),
                )
            )


log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.5
SELF_CHECK_INTERVAL_S = 1.0


class RoleEnded(Exception):
    """Ends a role: the frontend has chosen another role for this engine, and no work is left."""

    def __init__(self, successor: StartRole) -> None:
        super().__init__(f"this engine becomes a {successor.role} engine")
        self.successor = successor


class FrontendChannel(Protocol):
    """The engine thread's socket to its frontend. `take` and `post` never block."""

    def take(self) -> Sequence[FrontMessage]: ...

    def post(self, message: EngineMessage) -> None: ...

    def wait(self, timeout_s: float) -> None: ...


class MetricSource(Protocol):
    """A source of counters other than the role, named as in EngineStats."""

    def gauges(self) -> Mapping[str, float]: ...

    def distributions(self) -> Mapping[str, HistogramCounts]: ...


class NamedAdapters(Protocol):
    """The adapters that requests may use. AdapterLoader documents the methods."""

    def names(self) -> Mapping[str, AdapterId]: ...

    def load(self, name: str, path: str) -> Future[tuple[AdapterId, bool]]: ...

    def unload(self, name: str) -> bool: ...

    def poll(self) -> None: ...


class OperatorCommands(Protocol):
    """The commands of operators. EngineOperations documents the members."""

    @property
    def weights_in_use(self) -> WeightsId: ...

    @property
    def gauges(self) -> Mapping[str, float]: ...

    def steps(self, command: Command, role: ControlledRole) -> CommandSteps: ...


class _Call(NamedTuple):
    """A command in progress."""

    number: int
    command: Command
    steps: CommandSteps


_QUERIES = (DescribeNode, ExplainRequests)


def _prepares_nothing(role: str) -> None:
    raise FailedPrecondition("this engine has one role")


@dataclass(frozen=True, slots=True)
class ReportSources:
    """Sources of an engine's reports, in addition to its role.

    Attributes:
        clock: counts the steps since the start.
        links: usable producers by address. Their links are reported.
        gauges: return further gauges for the report, named as in EngineStats.
    """

    clock: StepClock
    pages_by_holder: Callable[[], dict[str, int]]
    links: Mapping[str, ProducerUp]
    meters: Sequence[MetricSource] = ()
    gauges: Sequence[Callable[[], Mapping[str, float]]] = ()


class EngineControl:
    """The engine's control interface. Engine thread only.

    Args:
        prepare: creates the additional parts of another role, while no work is in progress. Raises
            ConfigError or FailedPrecondition if this engine cannot have that role.
    Attributes:
        sources: of the reports.
        may_end: returns whether a node without requests may end its drain.
    """

    def __init__(
        self,
        channel: FrontendChannel,
        *,
        sources: ReportSources,
        cache: CacheReports,
        adapters: NamedAdapters,
        operations: OperatorCommands,
        prepare: Callable[[str], None] = _prepares_nothing,
    ) -> None:
        self._channel = channel
        self.sources = sources
        self._prepare = prepare
        self._successor: StartRole | None = None  # StartRole of the next role
        self._rested_s = 0.0
        self._num_self_checks = 0
        self._cache = cache
        self._adapters = adapters
        self._calls: list[_Call] = []  # in progress
        self._answers: list[NodeCallResult] = []  # to be sent after the next report
        self._operations = operations
        self._report_at = 0.0
        self._check_at = 0.0
        self._reported_drained = False
        self.draining = False
        self.may_end: Callable[[], bool] = lambda: True

    @property
    def weights(self) -> WeightsId:
        return self._operations.weights_in_use

    def poll(
        self, inside: ControlledRole, requests: Callable[[FrontMessage], None] | None = None
    ) -> None:
        """Handle the frontend's calls, and continue those in progress. Any other message goes to
        `requests`.
        """
        for message in self._channel.take():
            match message:
                case NodeCall(number, command):
                    self._advance(_Call(number, command, self._steps(command, inside)))
                case WatchCache():
                    self._cache.watch(message)
                case StartRole():
                    self._successor = message
                case _ if requests is not None:
                    requests(message)
                case _:
                    log.warning("unexpected message %s", kv(message_type=type(message).__name__))
        self._cache.flush()
        calls, self._calls = self._calls, []
        for call in calls:
            self._advance(call)
        now = time.monotonic()
        if now >= self._report_at:
            self._report_at = now + REPORT_INTERVAL_S
            self._report(inside)
        for answer in self._answers:
            self._channel.post(answer)
        self._answers.clear()

    def notify(self, message: EngineMessage) -> None:
        """Send the frontend an unsolicited message."""
        self._channel.post(message)

    def wait_for_work(
        self, inside: ControlledRole, self_check: Callable[[], None], longest_s: float = math.inf
    ) -> None:
        """Sleep until the frontend or another thread needs the engine, the next report is due, or
        `longest_s` has passed.

        Args:
            self_check: raises if pages or slots have leaked. It looks at every page, which takes
                milliseconds. Called at most once a second, only while there are no requests.
        Raises:
            RoleEnded: the role has ended and has passed a last self-check.
        """
        if self._successor is not None and not inside.busy:
            self_check()
            raise RoleEnded(self._successor)
        now = time.monotonic()
        if now >= self._check_at and not inside.busy:
            self._check_at = now + SELF_CHECK_INTERVAL_S
            self_check()
            self._num_self_checks += 1
        if self.draining and not inside.busy and not self._reported_drained and self.may_end():
            self._reported_drained = True
            self._channel.post(Drained())
        now = time.monotonic()
        self._channel.wait(max(0.0, min(self._report_at - now, longest_s)))
        self._rested_s += time.monotonic() - now

    def _report(self, inside: ControlledRole) -> None:
        gauges = {"swap_pages": float(inside.scheduler.num_host_pages_used)}
        gauges |= {f"queue_{name}": float(value) for name, value in inside.queues().items()}
        waiting = inside.waiting_by_class()
        gauges |= {f"waiting_{name}": float(waiting.get(name, 0)) for name in CLASSES}
        pages = self.sources.pages_by_holder()
        gauges |= {f"pages_{name}": float(value) for name, value in pages.items()}
        gauges |= {f"total_{name}": float(value) for name, value in inside.counters().items()}
        gauges |= self._operations.gauges
        gauges |= self._own_totals()
        for more in self.sources.gauges:
            gauges |= more()
        distributions = dict(inside.distributions())
        for meter in self.sources.meters:
            gauges |= meter.gauges()
            distributions |= meter.distributions()
        self._channel.post(
            EngineStats(
                steps=self.sources.clock.reading.finished,
                gauges=gauges,
                state=self._state(inside),
                pages_free=pages["free"] + pages["cache"],
                links=tuple(self.sources.links.values()),
                distributions=distributions,
                backlogs=inside.backlogs(),
                adapters=dict(self._adapters.names()),
                weights=self.weights,
            )
        )

    def _state(self, inside: ControlledRole) -> str:
        if self.draining:
            return "draining"
        return "paused" if inside.scheduler.paused else "ready"

    def _own_totals(self) -> dict[str, float]:
        return {
            "total_waited/work": self._rested_s,
            "total_self_checks": float(self._num_self_checks),
            "total_thread_cpu": time.thread_time(),
            "total_process_cpu": time.process_time(),
        }

    def _advance(self, call: _Call) -> None:
        """Continue a command until it waits or ends. The report before its response has the change
        that it made.
        """
        try:
            for result in call.steps:
                if result is None:
                    self._calls.append(call)
                    return
                self._answer(call, result)
        except ServingError as error:
            self._answer(call, NodeCallResult(error=str(error)))

    def _answer(self, call: _Call, result: NodeCallResult) -> None:
        self._answers.append(replace(result, number=call.number))
        if not isinstance(call.command, _QUERIES):
            self._report_at = 0.0

    def _steps(self, command: Command, inside: ControlledRole) -> CommandSteps:
        match command:
            case DescribeNode():
                description = {
                    "pages": self.sources.pages_by_holder(),
                    "queues": inside.queues(),
                    "counters": inside.counters(),
                }
                yield NodeCallResult(description=description)
            case DrainNode() | ResumeNode():
                self.draining = isinstance(command, DrainNode)
                self._reported_drained = False
                yield NodeCallResult()
            case PrepareRole(role):
                self._prepare(role)
                yield NodeCallResult()
            case FlushCache():
                yield NodeCallResult(integer=inside.scheduler.flush_cache())
            case AbortRequests(request_id):
                yield NodeCallResult(integer=inside.abort(request_id))
            case ExplainRequests(request_id):
                yield NodeCallResult(flights=inside.explain(request_id))
            case LoadAdapter(name, path):
                adapter, fresh = yield from self._load(name, path)
                yield NodeCallResult(integer=int(fresh), adapter=adapter)
            case UnloadAdapter(name):
                yield NodeCallResult(integer=int(self._adapters.unload(name)))
            case _:
                yield from self._operations.steps(command, inside)

    def _load(self, name: str, path: str) -> Generator[None, None, tuple[AdapterId, bool]]:
        loading = self._adapters.load(name, path)
        while True:
            self._adapters.poll()
            if loading.done():
                return loading.result()
            yield None
