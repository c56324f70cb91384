"""Live migration of one request, and planners' reports, across a router's worker processes."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice

import msgspec

from common.errors import FailedPrecondition, InvalidRequest, NodeUnavailable, NotFound
from protos.router_pb2 import MoveResponse, Plan, PlanEvent
from router.cluster.cluster import Cluster
from router.cluster.decode_client import MigratableRequest, MigrationOutcome
from router.workers import LONGEST_S, OtherProcesses, ProcessQuery

_MOVE, _MOVABLE = "/move", "/movable"  # paths between worker processes
MOVE_S = 20.0  # seconds: the nodes may have to pair, and the target may have to free capacity
_MOST_NAMED = 64


class MigrationService:
    """Live migrations on command, of requests in any worker process. For one event loop."""

    def __init__(self, clusters: Sequence[Cluster], other_processes: OtherProcesses) -> None:
        self._clusters = clusters
        self._movables: ProcessQuery[list[str]] = ProcessQuery(
            other_processes, _MOVABLE, self._movable, list[str]
        )
        self._moves: ProcessQuery[MigrationOutcome | None] = ProcessQuery(
            other_processes, _MOVE, self._move, MigrationOutcome | None
        )

    async def move(self, request_id: str, source: str, target: str) -> MoveResponse:
        """Migrate one request to another decode node.

        Args:
            request_id: the request. Empty: any request at `source`.
            source: address of a decode node. Ignored if `request_id` is given.
            target: address of the target node. Empty: any node.

        Raises:
            InvalidRequest: neither request nor source is given.
            NotFound: there is no such request.
            NodeUnavailable: the request was not found, but a worker process did not respond.
            FailedPrecondition: the request stays where it is.
        """
        if not (request_id or source):
            raise InvalidRequest("request_id and source are empty")
        request_id = request_id or await self._any_at(source)
        moved = await self._move(request_id, target)
        if moved is None:
            others = await self._moves.ask(MOVE_S + LONGEST_S, request_id=request_id, target=target)
            found = [one for one in others.answers if one is not None]
            if not found:
                sentence = f"no decode node runs a request {request_id[:256]!r}"
                raise _unknown(sentence, others.num_silent)
            # Two processes may run requests of the same name: prefer a result that migrated.
            moved = next((one for one in found if not one.because), found[0])
        if moved.because:
            raise FailedPrecondition(f"not migrated: {moved.because}")
        return MoveResponse(request_id=request_id, source=moved.source, target=moved.target)

    async def _any_at(self, source: str) -> str:
        own = self._movable(source)
        if own:
            return own[0]
        others = await self._movables.ask(source=source)
        for ids in others.answers:
            if ids:
                return ids[0]
        sentence = f"no request at {source[:256]!r} can be migrated"
        raise _unknown(sentence, others.num_silent)

    def _migratable(self) -> Iterator[MigratableRequest]:
        return chain.from_iterable(each.migratable() for each in self._clusters)

    def _movable(self, source: str) -> list[str]:
        """Return ids of this process's requests at a node that can migrate, up to a limit."""
        here = (each for each in self._migratable() if each.address == source)
        return [each.request_id for each in here if each.movable][:_MOST_NAMED]

    async def _move(self, request_id: str, target: str) -> MigrationOutcome | None:
        """Migrate a request within MOVE_S. Return None if this process runs no such request."""
        for running in self._migratable():
            if running.request_id == request_id:
                break
        else:
            return None
        source = running.address
        if not running.movable:
            return MigrationOutcome(
                "", "it has no token yet, is being migrated, or was just migrated", source
            )
        if source == target:
            return MigrationOutcome("", "it already runs there", source)
        task = running.migrate(target)
        await asyncio.wait({task}, timeout=MOVE_S)
        if not task.done():
            return MigrationOutcome("", "the migration is not complete yet", source)
        if task.cancelled():
            return MigrationOutcome("", "the request or its node has ended", source)
        return msgspec.structs.replace(task.result(), source=source)


def _unknown(sentence: str, num_silent: int) -> NotFound | NodeUnavailable:
    if not num_silent:
        return NotFound(sentence)
    return NodeUnavailable(f"{sentence}; {num_silent} processes of this router did not respond")


NUM_KEPT = 32  # events kept for display
MOST_EVENTS = 16  # events in one report
_MOST_CHARACTERS = 512
_MOST_PRESSURES = 8  # roles with a pressure: there are two
_LONGEST_AGO_S = 3600.0

_PLAN = "/plan"  # path between worker processes


# Each process keeps the planner reports that it received, and responses merge the reports of all
# processes. The router does not act on them.
class Plans:
    """Planner reports about one model, for display, from all worker processes. For one event loop.

    Args:
        number: index of the model among the router's models.
    """

    def __init__(
        self,
        other_processes: OtherProcesses,
        clock: Callable[[], float] = time.monotonic,
        number: int = 0,
    ) -> None:
        self._clock = clock
        self._last = Plan()  # without events
        self._at = 0.0
        self._events: deque[tuple[float, PlanEvent]] = deque(maxlen=NUM_KEPT)  # with its time
        self._query = ProcessQuery(other_processes, f"{_PLAN}/{number}", self.own, Plan)

    def take(self, plan: Plan) -> None:
        """Store a planner's report. Raise InvalidRequest if it is malformed."""
        _check(plan)
        self._at = now = self._clock()
        for event in reversed(plan.events):
            self._events.append((now - event.ago_s, event))
        self._last = Plan(acts=plan.acts, pressures=plan.pressures)

    async def now(self) -> Plan:
        return together([self.own(), *(await self._query.ask()).answers])

    def own(self) -> Plan:
        """Return the last report to this process, or one without pressures."""
        now = self._clock()
        plan = Plan(ago_s=now - self._at) if self._last.pressures else Plan()
        plan.MergeFrom(self._last)
        plan.events.extend(
            PlanEvent(what=event.what, because=event.because, ago_s=now - at)
            for at, event in reversed(self._events)
        )
        return plan


def together(plans: Iterable[Plan]) -> Plan:
    """Merge reports: the latest plan with the newest events of all."""
    plans = [plan for plan in plans if plan.pressures]
    if not plans:
        return Plan()
    newest = min(plans, key=lambda plan: plan.ago_s)
    events = sorted((event for plan in plans for event in plan.events), key=lambda e: e.ago_s)
    return Plan(
        acts=newest.acts,
        pressures=newest.pressures,
        ago_s=newest.ago_s,
        events=islice(events, NUM_KEPT),
    )


def _check(plan: Plan) -> None:
    if not 1 <= len(plan.pressures) <= _MOST_PRESSURES:
        raise InvalidRequest(f"plan.pressures: expected 1 to {_MOST_PRESSURES} entries")
    if len(plan.events) > MOST_EVENTS:
        raise InvalidRequest(f"plan.events: at most {MOST_EVENTS} are allowed")
    texts = [*plan.pressures, *(text for each in plan.events for text in (each.what, each.because))]
    if any(len(text) > _MOST_CHARACTERS for text in texts):
        raise InvalidRequest(f"plan: a text may have at most {_MOST_CHARACTERS} characters")
    if not all(map(math.isfinite, plan.pressures.values())):
        raise InvalidRequest("plan.pressures: expected finite numbers")
    if not all(0 <= event.ago_s <= _LONGEST_AGO_S for event in plan.events):
        raise InvalidRequest(f"plan.events.ago_s: expected 0 to {_LONGEST_AGO_S:g}")
