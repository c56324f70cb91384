"""The planner's report to its router, for the router's page: pressure of each role, decisions and
actions."""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping

from cli.client import UnfinishedRestart
from cli.operating.fleet import Fleet
from common.logs import kv
from protos.router_pb2 import Plan, PlanEvent, ReportPlanRequest

log = logging.getLogger(__name__)

# Limits of a router: events in one report, and characters of a text.
_MOST_EVENTS = 16
_MOST_CHARACTERS = 512


class DecisionLog:
    """Reports not yet sent to the router. Not thread-safe: one event loop only.

    Args:
        acts: whether the planner carries out its decisions.
        model: name of the served model. Empty: the only one.
    """

    def __init__(
        self,
        fleet: Fleet,
        router: str,
        *,
        acts: bool,
        model: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._router = router
        self._acts = acts
        self._model = model
        self._clock = clock
        self._unreported: deque[tuple[float, str, str]] = deque(maxlen=_MOST_EVENTS)
        self._refusal = ""

    def note(self, what: str, because: str) -> None:
        """Queue an event. It is sent with each report until the router has accepted it."""
        event = what[:_MOST_CHARACTERS], because[:_MOST_CHARACTERS]
        self._unreported.append((self._clock(), *event))

    async def report(self, pressures: Mapping[str, float]) -> None:
        """Send a report of the latest look. A router that rejects it does not stop the planner.

        Args:
            pressures: by role.
        """
        now = self._clock()
        events = [
            PlanEvent(what=what, because=because, ago_s=now - at)
            for at, what, because in reversed(self._unreported)
        ]
        plan = Plan(acts=self._acts, pressures=pressures, events=events, model=self._model)
        try:
            await self._fleet.call_router(self._router, "ReportPlan", ReportPlanRequest(plan=plan))
        except UnfinishedRestart as undone:
            if str(undone) != self._refusal:
                log.warning("decision not reported to the router %s", kv(reason=undone))
            self._refusal = str(undone)
        else:
            self._unreported.clear()
            self._refusal = ""
