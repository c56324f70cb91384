"""Planner decisions as a pure function of the observed cluster and its load.

A role is *pressed* if its recent mean pressure is at least 1.0. It can *spare* a node if the
pressure on the remaining nodes would have been well below 1.0 during the whole window. The gap
between the two is the hysteresis: a role is not pressed by giving a node away.

A decision uses only looks at the same nodes, and needs enough of them. So after any change of the
cluster, no decision follows before its effect is visible. The last node of a role is never removed.
A migration does not change the nodes, so another one may follow immediately.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TypeAlias

from protos.router_pb2 import ClusterNode, GetClusterResponse

ROLES = ("prefill", "decode")
_WAITING = ("prealloc", "waiting", "retracted")  # decode queues of requests without pages


@dataclass(frozen=True, slots=True)
class NodeFigures:
    """The figures that a node reports.

    Attributes:
        instance: changes when the node starts or changes its role.
        queued_s: seconds until the queued prompts are computed.
        token_s: seconds per prompt token. 0.0: no request has waited long enough to measure it.
        prompt_tokens: prompt tokens accepted since the instance began.
        occupied: share of its pages that requests hold.
        running, coming, waiting: requests of a decode node that run, that are in hand-off, and that
            have no pages.
    """

    address: str
    role: str
    instance: int
    state: str
    queued_s: float = 0.0
    token_s: float = 0.0
    prompt_tokens: int = 0
    occupied: float = 0.0
    running: int = 0
    coming: int = 0
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """The nodes of a cluster at one moment: one look.

    Attributes:
        at: seconds, by one clock for all looks.
        nodes: figures by address.
    """

    at: float
    nodes: tuple[NodeFigures, ...]

    @property
    def roster(self) -> tuple[tuple[str, str, int, str], ...]:
        """Return a value that changes with every change of the cluster's nodes."""
        return tuple((node.address, node.role, node.instance, node.state) for node in self.nodes)

    def of(self, role: str) -> list[NodeFigures]:
        """Return the ready nodes of a role."""
        return [node for node in self.nodes if node.role == role and node.state == "ready"]


def look_of(cluster: GetClusterResponse, at: float, model: str = "") -> ClusterSnapshot:
    """Return a look from a router's description of its cluster.

    Args:
        model: only nodes of this model count. Empty: the router has no other.
    """
    own = [node for node in cluster.nodes if model in ("", node.served_model)]
    nodes = sorted(own, key=lambda node: node.address)
    return ClusterSnapshot(at, tuple(_figures(node) for node in nodes))


def _figures(node: ClusterNode) -> NodeFigures:
    total = sum(node.pages.values())
    free = node.pages.get("free", 0) + node.pages.get("cache", 0)
    return NodeFigures(
        address=node.address,
        role=node.role,
        instance=node.instance_id,
        state=node.state,
        queued_s=node.prompts.queued_s,
        token_s=node.prompts.token_s,
        prompt_tokens=node.counters.get("prompt_tokens", 0),
        occupied=(total - free) / total if total else 0.0,
        running=node.queues.get("on_device", 0),
        coming=node.queues.get("transfer", 0),
        waiting=sum(node.queues.get(queue, 0) for queue in _WAITING),
    )


_MOSTLY = 0.5
_FULL = 0.9  # a slot may be free for a moment between two requests
_ALL_BUSY = 0.99  # a node without idle time is at capacity, and above it if requests wait


# Pressure is the load of a role relative to its capacity. 1.0 is the intended maximum.
@dataclass(frozen=True, slots=True)
class PressureThresholds:
    """The load of a node that counts as a pressure of 1.0.

    Attributes:
        queued_s: queue time of prompts at a prefill node, in seconds.
        occupied: share of a decode node's pages that requests hold.
        running: running requests of a decode node. 0: as many as it has pages for.
    """

    queued_s: float = 1.0
    occupied: float = 0.9
    running: int = 0


def pressure(role: str, looks: Sequence[ClusterSnapshot], limits: PressureThresholds) -> float:
    """Return the mean pressure of a role's nodes at the last of these looks.

    All looks must have the same nodes. Counters are compared between the first and the last look.
    The mean counts, because the nodes share the load.
    """
    first, last = looks[0], looks[-1]
    nodes = last.of(role)
    if not nodes:
        return 0.0
    if role == "decode":
        return sum(of_decode(node, limits) for node in nodes) / len(nodes)
    before = {node.address: node for node in first.of(role)}
    seconds = last.at - first.at
    return sum(_of_prefill(n, before[n.address], seconds, limits) for n in nodes) / len(nodes)


def _of_prefill(
    node: NodeFigures, before: NodeFigures, seconds: float, limits: PressureThresholds
) -> float:
    busy_s = (node.prompt_tokens - before.prompt_tokens) * node.token_s
    busy = min(_ALL_BUSY, busy_s / seconds) if seconds > 0 else 0.0
    return max(busy, node.queued_s / limits.queued_s)


def of_decode(node: NodeFigures, limits: PressureThresholds) -> float:
    # Requests in hand-off hold pages while they wait for prefill nodes. They count only if this
    # node has no free slot.
    share = node.running / max(1, node.running + node.coming)
    by_pages = node.occupied * share / limits.occupied
    if node.waiting and share >= _MOSTLY:  # as if the running requests were that many more
        by_pages = max(by_pages, (node.running + node.waiting) / node.running)
    if not limits.running:
        return by_pages
    full = node.running >= _FULL * limits.running
    demand = node.running + (node.coming + node.waiting if full else 0)
    return max(by_pages, demand / limits.running)


_FEWER = 2  # minimum difference in requests: with less, the two would only swap


# Requests stay where they were placed, so load becomes uneven: a node that has changed its role
# starts empty, and long responses collect at random. Requests migrate one at a time, and never to a
# node that would then be as overloaded.
def uneven(
    looks: Sequence[ClusterSnapshot], limits: PressureThresholds, spare: float
) -> tuple[NodeFigures, NodeFigures] | None:
    """Return the node that should give a request away, and the one that should receive it.

    Both must qualify in the mean of all of these looks.

    Args:
        looks: looks with the same nodes.
        spare: maximum pressure of a node that may receive a request.
    """
    nodes = looks[-1].of("decode")
    if len(nodes) < 2:
        return None
    now = {node.address: of_decode(node, limits) for node in nodes}
    lately = {
        address: fmean(
            of_decode(node, limits)
            for look in looks
            for node in look.nodes
            if node.address == address
        )
        for address in now
    }
    by_need = sorted(nodes, key=lambda node: (now[node.address], node.address))
    target, source = by_need[0], by_need[-1]
    too_much = min(now[source.address], lately[source.address]) >= 1.0
    has_room = max(now[target.address], lately[target.address]) <= spare
    if not (too_much and has_room and source.running >= target.running + _FEWER):
        return None
    of_one = now[source.address] / source.running
    return (source, target) if now[target.address] + of_one < 1.0 else None


_MOST = 2.0
_GONE = ("unreachable", "unhealthy")  # not a change in progress: other nodes work without these


@dataclass(frozen=True, slots=True)
class PlannerRules:
    """Limits of the decisions.

    Attributes:
        spare: maximum pressure of the remaining nodes when a node is removed.
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
        history: recent looks, oldest first. Older ones may be missing.
    """
    looks = _of_one_roster(history)
    if not looks:
        return WaitAction("no observations yet")
    changing = [node for node in looks[-1].nodes if node.state not in ("ready", *_GONE)]
    if changing:
        return WaitAction(f"{changing[0].role} {changing[0].address} is {changing[0].state}")
    age_s = looks[-1].at - looks[0].at
    if age_s >= rules.sustained_s and (move := _move(looks, rules)) is not None:
        return move
    settled_s = max(rules.settle_s, rules.sustained_s)
    if age_s < settled_s:
        return WaitAction(f"the nodes changed less than {settled_s:g} s ago")
    recent = _Window(looks, rules.sustained_s, rules)
    pressed = [role for role in ROLES if recent.mean(role) >= 1.0]
    for role in sorted(pressed, key=recent.mean, reverse=True):
        (other,) = set(ROLES) - {role}
        why = f"{role} nodes have {recent.mean(role):.2f} of their maximum load"
        if recent.can_spare(other):
            node = _lightest(looks[-1].of(other))
            left = recent.most_without_one(other)
            return SwitchRoleAction(
                node.address, role, f"{why}, {other} nodes would have {left:.2f} with one fewer"
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
        ", ".join(
            f"{role} nodes have {recent.mean(role):.2f} of their maximum load" for role in ROLES
        )
    )


def pressures(history: Sequence[ClusterSnapshot], rules: PlannerRules) -> Mapping[str, float]:
    """Return the recent mean pressure of each role."""
    looks = _of_one_roster(history)
    recent = _Window(looks, rules.sustained_s, rules) if looks else None
    return {role: recent.mean(role) if recent else 0.0 for role in ROLES}


class _Window:
    """The last looks at the same nodes, each with the earlier looks that count for it."""

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
        """Return the mean pressure over time.

        One look counts for at most _MOST, so that a short peak does not press a role.
        """
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
        f"it has {here:.2f} of its maximum load, the target {there:.2f}",
    )


def _of_one_roster(history: Sequence[ClusterSnapshot]) -> Sequence[ClusterSnapshot]:
    """Return the last looks that have the same nodes as the newest."""
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
