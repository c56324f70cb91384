"""What is to be changed about a cluster: a pure function of what was seen of it.

A role is *pressed* where its pressure has been 1.0 or more lately, in the mean, and can *spare* a
node where those that would be left would have been well below that, all the while. Between the two
lies the hysteresis: who has given a node is not pressed by that, and asks for none. A change is
decided of looks at one roster only, and of enough of them: whatever has changed the cluster, a
plan, an operator or a crash, nothing follows before it has shown what it does. The last node of a
role is never taken. A move changes no roster: it may follow another one at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TypeAlias

from cli.planner.balance import uneven
from cli.planner.looks import ROLES, Look, NodeFigures
from cli.planner.pressure import Limits, of_decode, pressure

_MOST = 2.0
_GONE = ("unreachable", "unhealthy")  # for as long as counts: others do without such a node


@dataclass(frozen=True, slots=True)
class Rules:
    """
    Attributes:
        spare: most pressure that the nodes which are left may have.
        sustained_s: for so long a role must have been pressed, or able to spare.
        settle_s: from one change of the cluster to the next, at least.
        idle_s: for so long it must have been able to spare a node that nobody else needs.
    """

    limits: Limits = field(default_factory=Limits)
    spare: float = 0.7
    sustained_s: float = 10.0
    settle_s: float = 30.0
    idle_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Nothing:
    """What there is, is right."""

    because: str


@dataclass(frozen=True, slots=True)
class Wait:
    """It cannot be told yet."""

    because: str


@dataclass(frozen=True, slots=True)
class Switch:
    """A node is to take another role."""

    address: str
    role: str
    because: str


@dataclass(frozen=True, slots=True)
class Move:
    """One of a decode node's running requests is to go on at another."""

    source: str
    target: str
    because: str


@dataclass(frozen=True, slots=True)
class Add:
    """There should be one more node of a role."""

    role: str
    because: str


@dataclass(frozen=True, slots=True)
class Remove:
    """A node is not needed."""

    address: str
    role: str
    because: str


Decision: TypeAlias = Nothing | Wait | Switch | Move | Add | Remove


def decide(history: Sequence[Look], rules: Rules) -> Decision:
    """
    Args:
        history: looks, the oldest first; any part of it, if it is recent.
    """
    looks = _of_one_roster(history)
    if not looks:
        return Wait("nothing has been seen yet")
    changing = [node for node in looks[-1].nodes if node.state not in ("ready", *_GONE)]
    if changing:
        return Wait(f"{changing[0].role} {changing[0].address} is {changing[0].state}")
    age_s = looks[-1].at - looks[0].at
    if age_s >= rules.sustained_s and (move := _move(looks, rules)) is not None:
        return move
    settled_s = max(rules.settle_s, rules.sustained_s)
    if age_s < settled_s:
        return Wait(f"these nodes are known for less than {settled_s:g} s")
    recent = _Window(looks, rules.sustained_s, rules)
    pressed = [role for role in ROLES if recent.mean(role) >= 1.0]
    for role in sorted(pressed, key=recent.mean, reverse=True):
        (other,) = set(ROLES) - {role}
        why = f"{role} nodes have {recent.mean(role):.2f} times what they should"
        if recent.can_spare(other):
            node = _lightest(looks[-1].of(other))
            left = recent.most_without_one(other)
            return Switch(node.address, role, f"{why}, {other} nodes {left:.2f} with one fewer")
        return Add(role, f"{why}, and no {other} node can be spared")
    if age_s >= rules.idle_s:
        idle = _Window(looks, rules.idle_s, rules)
        for role in ROLES:
            if idle.can_spare(role):
                node, left = _lightest(looks[-1].of(role)), idle.most_without_one(role)
                return Remove(
                    node.address, role, f"{role} nodes would have had {left:.2f} with one fewer"
                )
    return Nothing(
        ", ".join(f"{role} nodes have {recent.mean(role):.2f} of what they may" for role in ROLES)
    )


def pressures(history: Sequence[Look], rules: Rules) -> Mapping[str, float]:
    """Of each role, lately, in the mean."""
    looks = _of_one_roster(history)
    recent = _Window(looks, rules.sustained_s, rules) if looks else None
    return {role: recent.mean(role) if recent else 0.0 for role in ROLES}


class _Window:
    """The last looks, and what is before each of them for as long as counts."""

    def __init__(self, looks: Sequence[Look], seconds: float, rules: Rules) -> None:
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
        """One look counts for _MOST at most: what was there for a moment presses nobody."""
        return fmean(min(each, _MOST) for each in self._pressures[role])

    def most_without_one(self, role: str) -> float:
        size = self._sizes[role]
        return max(self._pressures[role]) * size / (size - 1)

    def can_spare(self, role: str) -> bool:
        return self._sizes[role] > 1 and self.most_without_one(role) <= self._rules.spare


def _move(looks: Sequence[Look], rules: Rules) -> Move | None:
    since = looks[-1].at - rules.sustained_s
    recent = [look for look in looks if look.at >= since]
    found = uneven(recent, rules.limits, rules.spare)
    if found is None:
        return None
    source, target = found
    here, there = (of_decode(node, rules.limits) for node in found)
    return Move(
        source.address,
        target.address,
        f"it has {here:.2f} times what it should, the other one {there:.2f}",
    )


def _of_one_roster(history: Sequence[Look]) -> Sequence[Look]:
    """The last looks, as far back as they have the nodes of the very last."""
    first = len(history)
    while first and history[first - 1].roster == history[-1].roster:
        first -= 1
    return history[first:]


def _first(looks: Sequence[Look], end: int, seconds: float) -> int:
    """Of the looks that are not older than so long, at the look `end`."""
    return next(n for n, look in enumerate(looks) if look.at >= looks[end].at - seconds)


def _lightest(nodes: Sequence[NodeFigures]) -> NodeFigures:
    """Whose requests are the least to move, or to wait for."""
    return min(nodes, key=lambda node: (node.occupied, node.queued_s, node.address))
