"""Metrics of `baton planner`."""

from collections.abc import Mapping
from typing import Literal, get_args

from common.metrics.declared import MetricValues, counter, gauge
from common.metrics.program import INFO, PROCESS, registry_of

Decided = Literal["switch", "move", "add", "remove"]

_ROLES = ("prefill", "decode")
PRESSURE = gauge(
    "baton_planner_pressure",
    "Current load of each role. 1 is the intended maximum.",
    kind=_ROLES,
)
WANTED = gauge(
    "baton_planner_target_nodes",
    "Number of nodes that each role should have after the last decision.",
    kind=_ROLES,
)
DECISIONS = counter(
    "baton_planner_decisions",
    "Total decisions that differ from the one before. switch: change a node's role. move: "
    "migrate a request. add: a role needs another node. remove: a node is superfluous.",
    decision=get_args(Decided),
)
SWITCHES = counter(
    "baton_planner_role_changes",
    "Total role changes that the planner requested. completed: succeeded. failed: refused or "
    "failed.",
    outcome=("completed", "failed"),
)
MOVES = counter(
    "baton_planner_rebalances",
    "Total live migrations that the planner requested. completed: succeeded. failed: refused or "
    "failed.",
    outcome=("completed", "failed"),
)
DECLARED = (PRESSURE, WANTED, DECISIONS, SWITCHES, MOVES, INFO, *PROCESS)


class PlannerMetrics:
    """Metrics of the planner. Written by its event loop, read by the scraping thread."""

    def __init__(self) -> None:
        values = MetricValues()
        self._pressure = values.numbers(PRESSURE)
        self._wanted = values.numbers(WANTED)
        self._decisions = values.numbers(DECISIONS)
        self._switches = values.numbers(SWITCHES)
        self._moves = values.numbers(MOVES)
        self.registry = registry_of(lambda: "planner", values.families)

    def seen(self, pressures: Mapping[str, float], wanted: Mapping[str, int]) -> None:
        """Record the pressures and the wanted number of nodes, by role."""
        for role in pressures:
            self._pressure[role,], self._wanted[role,] = pressures[role], wanted[role]

    def decided(self, decision: Decided) -> None:
        self._decisions[decision,] += 1

    def switched(self, *, done: bool) -> None:
        self._switches["completed" if done else "failed",] += 1

    def moved(self, *, done: bool) -> None:
        self._moves["completed" if done else "failed",] += 1
