"""Observations and decisions that planners have reported to this router, for display.

A planner reports to any process, so each process keeps its reports and the responses merge those of
all processes. The router itself does not act on them.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from common.errors import InvalidRequest
from protos.router_pb2 import Plan, PlanEvent
from router.workers.asking import SiblingProcesses, SiblingQuery, as_message

NUM_KEPT = 32  # events
MOST_EVENTS = 16  # in one report
_MOST_CHARACTERS = 512
_MOST_PRESSURES = 8  # roles: there are two
_LONGEST_AGO_S = 3600.0

_PLAN = "/plan"  # path between worker processes


@dataclass(frozen=True, slots=True)
class _Event:
    at: float
    what: str
    because: str


class Plans:
    """Planner reports of all processes of this router. For one event loop."""

    def __init__(
        self, siblings: SiblingProcesses, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._last = Plan()  # without events
        self._at = 0.0
        self._events: deque[_Event] = deque(maxlen=NUM_KEPT)
        self._query = SiblingQuery(siblings, _PLAN, self.own, as_message(Plan))

    def take(self, plan: Plan) -> None:
        """Store a planner's report. Raise InvalidRequest if it is malformed."""
        _check(plan)
        self._at = now = self._clock()
        for event in reversed(plan.events):
            self._events.append(_Event(now - event.ago_s, event.what, event.because))
        self._last = Plan(acts=plan.acts, pressures=plan.pressures)

    async def now(self) -> Plan:
        return together([self.own(), *(await self._query.ask()).answers])

    def own(self) -> Plan:
        """Return the last report to this process. Without one, it has no pressures."""
        now = self._clock()
        plan = Plan(ago_s=now - self._at) if self._last.pressures else Plan()
        plan.MergeFrom(self._last)
        plan.events.extend(
            PlanEvent(what=event.what, because=event.because, ago_s=now - event.at)
            for event in reversed(self._events)
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
        raise InvalidRequest(f"plan.pressures: from 1 to {_MOST_PRESSURES}")
    if len(plan.events) > MOST_EVENTS:
        raise InvalidRequest(f"plan.events: {MOST_EVENTS} at the most")
    texts = [*plan.pressures, *(text for each in plan.events for text in (each.what, each.because))]
    if any(len(text) > _MOST_CHARACTERS for text in texts):
        raise InvalidRequest(f"plan: texts have {_MOST_CHARACTERS} characters at the most")
    if not all(map(math.isfinite, plan.pressures.values())):
        raise InvalidRequest("plan.pressures: a pressure is a finite number")
    if not all(0 <= event.ago_s <= _LONGEST_AGO_S for event in plan.events):
        raise InvalidRequest(f"plan.events.ago_s: from 0 to {_LONGEST_AGO_S:g}")
