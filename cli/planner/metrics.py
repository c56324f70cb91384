"""Metrics of `baton planner`."""

from collections.abc import Iterable, Mapping
from typing import Literal

from prometheus_client.core import Metric

from common.metrics.declared import MetricDeclaration
from common.metrics.program import INFO, PROCESS, registry_of

Decided = Literal["switch", "move", "add", "remove"]

_ROLES = {"kind": ("prefill", "decode")}
PRESSURE = MetricDeclaration(
    "baton_planner_pressure",
    "gauge",
    "Current load of the nodes of a role, relative to the intended maximum of 1.",
    _ROLES,
)
WANTED = MetricDeclaration(
    "baton_planner_target_nodes",
    "gauge",
    "Current number of nodes that a role should have after the last decision.",
    _ROLES,
)
DECISIONS = MetricDeclaration(
    "baton_planner_decisions",
    "counter",
    "Total decisions that differ from the one before.",
    {"decision": ("switch", "move", "add", "remove")},
)
SWITCHES = MetricDeclaration(
    "baton_planner_role_changes",
    "counter",
    "Total requested role changes, by result.",
    {"outcome": ("done", "undone")},
)
MOVES = MetricDeclaration(
    "baton_planner_rebalances",
    "counter",
    "Total requested live migrations, by result.",
    {"outcome": ("done", "undone")},
)
DECLARED = (PRESSURE, WANTED, DECISIONS, SWITCHES, MOVES, INFO, *PROCESS)


class PlannerMetrics:
    """Counters and gauges of the planner. Written by its event loop, read on any thread that
    scrapes."""

    def __init__(self) -> None:
        self._pressure = PRESSURE.numbers()
        self._wanted = WANTED.numbers()
        self._decisions = DECISIONS.numbers()
        self._switches = SWITCHES.numbers()
        self._moves = MOVES.numbers()
        self.registry = registry_of(lambda: "planner", self._families)

    def seen(self, pressures: Mapping[str, float], wanted: Mapping[str, int]) -> None:
        """Record the pressures and the wanted number of nodes, by role."""
        for role in pressures:
            self._pressure[role,], self._wanted[role,] = pressures[role], wanted[role]

    def decided(self, decision: Decided) -> None:
        self._decisions[decision,] += 1

    def switched(self, *, done: bool) -> None:
        self._switches["done" if done else "undone",] += 1

    def moved(self, *, done: bool) -> None:
        self._moves["done" if done else "undone",] += 1

    def _families(self) -> Iterable[Metric]:
        yield PRESSURE.family({**self._pressure})
        yield WANTED.family({**self._wanted})
        yield DECISIONS.family({**self._decisions})
        yield SWITCHES.family({**self._switches})
        yield MOVES.family({**self._moves})
