"""Planner decisions as a pure function of the observed cluster.

A role is *pressed* if its recent mean pressure is 1.0 or more. It can *spare* a node if the
remaining nodes would have had a pressure well below that during the whole window. The gap between
the two is the hysteresis: a role that gave a node away is not pressed by that, and does not ask for
one back.

A decision uses only looks at one roster, and needs enough of them. After a change of the cluster,
by a plan, an operator or a crash, no decision follows before its effect is visible. The last node
of a role is never removed. A migration changes no roster, so it may follow another one at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TypeAlias

from cli.planner.balance import uneven
from cli.planner.looks import ROLES, ClusterSnapshot, NodeFigures
from cli.planner.pressure import PressureThresholds, of_decode, pressure

_MOST = 2.0
_GONE = ("unreachable", "unhealthy")  # not a change in progress: other nodes work without these


@dataclass(frozen=True, slots=True)
class PlannerRules:
    """Limits of the decisions.

    Attributes:
        spare: maximum pressure of the remaining nodes.
        sustained_s: seconds for which a role must have been pressed, or able to spare a node.
        settle_s: minimum seconds between two changes of the cluster.
        idle_s: seconds for which a role must have been able to spare a node that no role needs.
    """

    limits: PressureThresholds = field(default_factory=PressureThresholds)
    spare: float = 0.7
    sustained_s: float = 10.0
    settle_s: float = 30.0
    idle_s: float = 600.0


@dataclass(frozen=True, slots=True)
class NoAction:
    """No change is needed."""

    because: str


@dataclass(frozen=True, slots=True)
class WaitAction:
    """More looks are needed before a decision."""

    because: str


@dataclass(frozen=True, slots=True)
class SwitchRoleAction:
    """A node should change its role."""

    address: str
    role: str
    because: str


@dataclass(frozen=True, slots=True)
class ShiftCapacityAction:
    """A running request should migrate from one decode node to another."""

    source: str
    target: str
    because: str


@dataclass(frozen=True, slots=True)
class AddNodeAction:
    """A role needs one more node."""

    role: str
    because: str


@dataclass(frozen=True, slots=True)
class RemoveNodeAction:
    """A node is not needed."""

    address: str
    role: str
    because: str


Decision: TypeAlias = (
    NoAction
    | WaitAction
    | SwitchRoleAction
    | ShiftCapacityAction
    | AddNodeAction
    | RemoveNodeAction
)


def decide(history: Sequence[ClusterSnapshot], rules: PlannerRules) -> Decision:
    """Return the decision that follows from the looks.

    Args:
        history: recent looks, the oldest first. Older ones may be missing.
    """
    looks = _of_one_roster(history)
    if not looks:
        return WaitAction("nothing has been seen yet")
    changing = [node for node in looks[-1].nodes if node.state not in ("ready", *_GONE)]
    if changing:
        return WaitAction(f"{changing[0].role} {changing[0].address} is {changing[0].state}")
    age_s = looks[-1].at - looks[0].at
    if age_s >= rules.sustained_s and (move := _move(looks, rules)) is not None:
        return move
    settled_s = max(rules.settle_s, rules.sustained_s)
    if age_s < settled_s:
        return WaitAction(f"these nodes are known for less than {settled_s:g} s")
    recent = _Window(looks, rules.sustained_s, rules)
    pressed = [role for role in ROLES if recent.mean(role) >= 1.0]
    for role in sorted(pressed, key=recent.mean, reverse=True):
        (other,) = set(ROLES) - {role}
        why = f"{role} nodes have {recent.mean(role):.2f} times what they should"
        if recent.can_spare(other):
            node = _lightest(looks[-1].of(other))
            left = recent.most_without_one(other)
            return SwitchRoleAction(
                node.address, role, f"{why}, {other} nodes {left:.2f} with one fewer"
            )
        return AddNodeAction(role, f"{why}, and no {other} node can be spared")
    if age_s >= rules.idle_s:
        idle = _Window(looks, rules.idle_s, rules)
        for role in ROLES:
            if idle.can_spare(role):
                node, left = _lightest(looks[-1].of(role)), idle.most_without_one(role)
                return RemoveNodeAction(
                    node.address, role, f"{role} nodes would have had {left:.2f} with one fewer"
                )
    return NoAction(
        ", ".join(f"{role} nodes have {recent.mean(role):.2f} of what they may" for role in ROLES)
    )


def pressures(history: Sequence[ClusterSnapshot], rules: PlannerRules) -> Mapping[str, float]:
    """Return the recent mean pressure of each role."""
    looks = _of_one_roster(history)
    recent = _Window(looks, rules.sustained_s, rules) if looks else None
    return {role: recent.mean(role) if recent else 0.0 for role in ROLES}


class _Window:
    """The last looks, each with the preceding looks that count for it."""

    def __init__(
        self, looks: Sequence[ClusterSnapshot], seconds: float, rules: PlannerRules
    ) -> None:
        since = looks[-1].at - seconds
        self._rules = rules
        self._sizes = {role: len(looks[-1].of(role)) for role in ROLES}
        ends = [number for number, look in enumerate(looks) if look.at >= since]
        self._pressures = {
            role: [
                pressure(role, looks[_first(looks, end, rules.sustained_s) : end + 1], rules.limits)
                for end in ends
            ]
            for role in ROLES
        }

    def mean(self, role: str) -> float:
        """Return the mean pressure. One look counts for _MOST at most, so that a short peak presses
        no role."""
        return fmean(min(each, _MOST) for each in self._pressures[role])

    def most_without_one(self, role: str) -> float:
        size = self._sizes[role]
        return max(self._pressures[role]) * size / (size - 1)

    def can_spare(self, role: str) -> bool:
        return self._sizes[role] > 1 and self.most_without_one(role) <= self._rules.spare


def _move(looks: Sequence[ClusterSnapshot], rules: PlannerRules) -> ShiftCapacityAction | None:
    since = looks[-1].at - rules.sustained_s
    recent = [look for look in looks if look.at >= since]
    found = uneven(recent, rules.limits, rules.spare)
    if found is None:
        return None
    source, target = found
    here, there = (of_decode(node, rules.limits) for node in found)
    return ShiftCapacityAction(
        source.address,
        target.address,
        f"it has {here:.2f} times what it should, the other one {there:.2f}",
    )


def _of_one_roster(history: Sequence[ClusterSnapshot]) -> Sequence[ClusterSnapshot]:
    """Return the last looks, as far back as they have the nodes of the newest."""
    first = len(history)
    while first and history[first - 1].roster == history[-1].roster:
        first -= 1
    return history[first:]


def _first(looks: Sequence[ClusterSnapshot], end: int, seconds: float) -> int:
    """Return the index of the oldest look that is at most `seconds` older than the look `end`."""
    return next(n for n, look in enumerate(looks) if look.at >= looks[end].at - seconds)


def _lightest(nodes: Sequence[NodeFigures]) -> NodeFigures:
    """Return the node whose requests are the cheapest to migrate or to wait for."""
    return min(nodes, key=lambda node: (node.occupied, node.queued_s, node.address))
