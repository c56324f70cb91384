"""Planner decisions as a pure function of the observed cluster."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cli.client import UnfinishedRestart
from cli.operating.fleet import Fleet
from cli.planner.__main__ import Planner, check_model, parse, rules_of
from cli.planner.decide import (
    AddNodeAction,
    ClusterSnapshot,
    Decision,
    NoAction,
    NodeFigures,
    PlannerRules,
    PressureThresholds,
    RemoveNodeAction,
    ShiftCapacityAction,
    SwitchRoleAction,
    WaitAction,
    decide,
    look_of,
)
from cli.planner.metrics import PlannerMetrics
from common.errors import ConfigError
from protos.router_pb2 import (
    Backlog,
    ClusterNode,
    GetClusterResponse,
    ModelState,
    MoveResponse,
    Plan,
    ReportPlanResponse,
    RouterState,
)

RULES = PlannerRules(sustained_s=10.0, settle_s=30.0, idle_s=60.0)
EVERY_S = 2.0
# For any load of this machine.
PATIENT = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def node(number: int, role: str, pressure: float = 0.0, **figures: object) -> NodeFigures:
    reported: dict[str, object] = {"address": f"{number}:1", "role": role, "instance": number}
    if role == "decode":
        reported["running"] = 1
    reported["queued_s" if role == "prefill" else "occupied"] = pressure * (
        1.0 if role == "prefill" else 0.9
    )
    return NodeFigures(**{**reported, "state": "ready", **figures})  # type: ignore[arg-type]


def seen(seconds: float, *nodes: NodeFigures, since: float = 0.0) -> list[ClusterSnapshot]:
    """Return this state of nodes, seen for this duration."""
    return [ClusterSnapshot(since + EVERY_S * n, nodes) for n in range(int(seconds / EVERY_S) + 1)]


def test_an_overloaded_role_gets_a_node_from_the_role_with_spare_capacity():
    nodes = (
        node(1, "prefill", 1.5),
        node(2, "decode", 0.3),
        node(3, "decode", 0.2),
        node(4, "decode", 0.1),
    )
    decision = decide(seen(40.0, *nodes), RULES)
    assert isinstance(decision, SwitchRoleAction)
    assert (decision.address, decision.role) == ("4:1", "prefill")  # it has the least to migrate
    assert decision.because == (
        "prefill nodes have 1.50 of their maximum load, decode nodes would have 0.30 with one fewer"
    )


def test_no_decision_is_made_before_the_last_one_has_shown_its_effect():
    nodes = node(1, "prefill", 3.0), node(2, "decode"), node(3, "decode")
    for changed in ({"instance": 9}, {"role": "prefill"}):
        before = replace(nodes[2], **changed)  # type: ignore[arg-type]
        history = seen(60.0, *nodes[:2], before) + seen(28.0, *nodes, since=62.0)
        assert isinstance(decide(history, RULES), WaitAction)
        assert isinstance(decide([*history, ClusterSnapshot(92.0, nodes)], RULES), SwitchRoleAction)
    assert isinstance(decide([], RULES), WaitAction)
    for state in ("draining", "starting", "paused"):
        unready = (*nodes[:2], node(3, "decode", state=state))
        assert decide(seen(60.0, *unready), RULES) == WaitAction(f"decode 3:1 is {state}")


@pytest.mark.parametrize("state", ["unreachable", "unhealthy"])
def test_a_lost_node_does_not_block_decisions_forever(state):
    """A list of addresses may name a node that is never restarted. For a limited time it may
    return. Seen failing if every node must be ready."""
    nodes = node(1, "prefill", 3.0), node(2, "decode"), node(3, "decode")
    gone = node(4, "decode", state=state)
    history = seen(60.0, *nodes, replace(gone, state="ready"))
    history += seen(28.0, *nodes, gone, since=62.0)
    assert isinstance(decide(history, RULES), WaitAction)
    decision = decide([*history, ClusterSnapshot(92.0, (*nodes, gone))], RULES)
    assert isinstance(decision, SwitchRoleAction) and decision.address in ("2:1", "3:1")


def test_a_momentary_load_changes_nothing():
    calm = (node(1, "prefill"), node(2, "decode", 0.1), node(3, "decode", 0.1))
    burst = (node(1, "prefill", 50.0), *calm[1:])
    history = [*seen(40.0, *calm), ClusterSnapshot(42.0, burst), ClusterSnapshot(44.0, burst)]
    assert isinstance(decide(history, RULES), NoAction)


@pytest.mark.parametrize("decodes", [1, 2])
def test_if_no_node_can_change_its_role_more_nodes_are_requested(decodes):
    nodes = (node(1, "prefill", 2.0), *(node(2 + n, "decode", 0.5) for n in range(decodes)))
    decision = decide(seen(40.0, *nodes), RULES)
    assert isinstance(decision, AddNodeAction) and decision.role == "prefill"


def test_the_role_with_the_higher_pressure_is_helped_first():
    nodes = node(1, "prefill", 1.1), node(2, "prefill", 1.1), node(3, "decode", 1.9)
    decision = decide(seen(40.0, *nodes), RULES)
    assert isinstance(decision, AddNodeAction) and decision.role == "decode"


def test_a_node_that_has_been_idle_for_long_may_be_removed():
    nodes = node(1, "prefill", 0.1), node(2, "decode", 0.3), node(3, "decode", 0.1)
    assert isinstance(decide(seen(58.0, *nodes), RULES), NoAction)
    decision = decide(seen(60.0, *nodes), RULES)
    assert isinstance(decision, RemoveNodeAction) and decision.address == "3:1"


def test_a_prefill_node_that_computes_continuously_keeps_its_role():
    """Its queue is empty, which does not show how busy it is."""

    def look(at: float) -> ClusterSnapshot:
        busy = {"token_s": 0.001, "prompt_tokens": int(at * 800)}
        pair = (node(n, "prefill", **busy) for n in (1, 2))
        return ClusterSnapshot(at, (*pair, node(3, "decode", 1.5)))

    decision = decide([look(EVERY_S * n) for n in range(30)], RULES)
    assert isinstance(decision, AddNodeAction) and decision.role == "decode"


def test_pressure_of_decode_nodes_comes_from_waiting_and_from_running_requests():
    full = node(1, "decode", 0.5, running=4, waiting=4)
    others = node(2, "prefill"), node(3, "prefill")
    assert isinstance(decide(seen(40.0, *others, full), RULES), SwitchRoleAction)
    many = node(1, "decode", 0.1, running=8)
    assert isinstance(decide(seen(40.0, *others, many), RULES), NoAction)
    few = replace(RULES, limits=PressureThresholds(running=8))
    assert isinstance(decide(seen(40.0, *others, many), few), SwitchRoleAction)


def test_a_queue_of_prefill_nodes_does_not_keep_a_decode_node_from_becoming_one():
    waits = node(2, "decode", 0.5, running=1, coming=9, waiting=5), node(3, "decode")
    rules = replace(RULES, limits=PressureThresholds(running=4))
    decision = decide(seen(40.0, node(1, "prefill", 5.0), *waits), rules)
    assert isinstance(decision, SwitchRoleAction) and decision.role == "prefill"
    full = node(1, "decode", 0.5, running=4, coming=9)
    idle = (node(n, "prefill") for n in (2, 3))
    assert isinstance(decide(seen(40.0, full, *idle), rules), SwitchRoleAction)


def test_a_routers_report_is_parsed_correctly():
    said = ClusterNode(
        role="decode",
        address="a:1",
        instance_id=7,
        state="ready",
        pages={"free": 50, "cache": 25, "request": 20, "read": 5},
        queues={"on_device": 3, "transfer": 1, "prealloc": 2, "retracted": 1, "grammar": 9},
        counters={"prompt_tokens": 11},
        prompts=Backlog(queued_s=0.5, token_s=0.25),
    )
    (figures,) = look_of(GetClusterResponse(nodes=[said]), 3.0).nodes
    assert figures == NodeFigures("a:1", "decode", 7, "ready", 0.5, 0.25, 11, 0.25, 3, 1, 3)


def _decodes(*loads: tuple[int, float]) -> list[NodeFigures]:
    """Return decode nodes with these running requests and pressures."""
    return [
        node(n, "decode", pressure, running=running)
        for n, (running, pressure) in enumerate(loads, 2)
    ]


def test_a_request_migrates_from_an_overloaded_decode_node_to_one_with_capacity():
    # Long before the cluster has settled: no node changes its role.
    nodes = node(1, "prefill", 0.5), *_decodes((8, 1.2), (5, 0.9), (2, 0.3))
    assert decide(seen(12.0, *nodes), RULES) == ShiftCapacityAction(
        "2:1", "4:1", "it has 1.20 of its maximum load, the target 0.30"
    )
    assert isinstance(decide(seen(8.0, *nodes), RULES), WaitAction)


@pytest.mark.parametrize(
    "loads",
    [
        [(8, 1.2), (6, 0.8)],  # no node has capacity
        [(8, 0.95), (2, 0.1)],  # no node is overloaded
        [(2, 1.8), (1, 0.2)],  # two large requests: either would overload the target
        [(3, 1.2), (2, 0.1)],  # the nodes would only swap
    ],
)
def test_no_request_migrates_back_and_forth(loads):
    nodes = node(1, "prefill", 0.5), *_decodes(*loads)
    assert not isinstance(decide(seen(12.0, *nodes), RULES), ShiftCapacityAction)


def test_a_momentary_or_past_imbalance_causes_no_migration():
    even = node(1, "prefill", 0.5), *_decodes((5, 0.6), (5, 0.6))
    uneven = node(1, "prefill", 0.5), *_decodes((8, 1.2), (2, 0.2))
    for before, last in ((even, uneven), (uneven, even)):
        history = seen(10.0, *before) + seen(2.0, *last, since=12.0)
        assert isinstance(decide(history, RULES), WaitAction)


# A cluster whose nodes share the load: pressures follow from loads and from decisions.

LOADS = st.floats(0.0, 6.0)


def _after(nodes: dict[int, str], decision: Decision) -> dict[int, str]:
    match decision:
        case SwitchRoleAction(address, role):
            return {**nodes, int(address.partition(":")[0]): role}
        case RemoveNodeAction(address):
            return {n: role for n, role in nodes.items() if address != f"{n}:1"}
        case AddNodeAction(role):
            return {**nodes, max(nodes) + 1: role}
        case NoAction() | WaitAction() | ShiftCapacityAction():
            return nodes


def _lived(
    nodes: dict[int, str], loads: Sequence[tuple[float, float]], looks_each: int
) -> list[tuple[float, Decision]]:
    """Return the decisions for a cluster under a sequence of loads. Every decision is carried
    out."""
    made: list[tuple[float, Decision]] = []
    history: list[ClusterSnapshot] = []
    for number in range(len(loads) * looks_each):
        load = dict(zip(("prefill", "decode"), loads[number // looks_each], strict=True))
        counts = {role: list(nodes.values()).count(role) for role in load}
        reported = [node(n, role, load[role] / counts[role]) for n, role in sorted(nodes.items())]
        # A node with a new role is a new instance.
        reported = [replace(n, instance=10 * n.instance + (n.role == "prefill")) for n in reported]
        history.append(ClusterSnapshot(EVERY_S * number, tuple(reported)))
        history = history[-40:]
        decision = decide(history, RULES)
        if not isinstance(decision, NoAction | WaitAction):
            made.append((EVERY_S * number, decision))
            nodes = _after(nodes, decision)
        assert set(nodes.values()) == {"prefill", "decode"}, "the last node of a role is gone"
    return made


@PATIENT
@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.lists(st.tuples(LOADS, LOADS), min_size=1, max_size=5),
    st.integers(1, 30),
)
def test_role_changes_are_apart_and_never_take_the_last_node_of_a_role(
    prefill, decode, loads, looks_each
):
    roles = ["prefill"] * prefill + ["decode"] * decode
    made = _lived(dict(enumerate(roles, 1)), loads, looks_each)
    times = [at for at, _ in made]
    assert all(b - a >= RULES.settle_s for a, b in itertools.pairwise(times))


@PATIENT
@given(st.integers(1, 4), st.integers(1, 4), LOADS, LOADS)
def test_under_a_constant_load_no_change_is_reverted(prefill, decode, of_prefill, of_decode):
    roles = ["prefill"] * prefill + ["decode"] * decode
    made = [what for _, what in _lived(dict(enumerate(roles, 1)), [(of_prefill, of_decode)], 150)]
    grown = {each.role for each in made if isinstance(each, SwitchRoleAction | AddNodeAction)}
    shrunk = {each.role for each in made if isinstance(each, RemoveNodeAction)}
    given_up = {
        role
        for each in made
        if isinstance(each, SwitchRoleAction)
        for role in {"prefill", "decode"} - {each.role}
    }
    assert not grown & (shrunk | given_up)


class _Fleet:
    """A router's view of a cluster that lacks a prefill node."""

    def __init__(self) -> None:
        self.switched: list[tuple[str, str]] = []
        self.moved: list[tuple[str, str]] = []
        self.plans: list[Plan] = []
        self.deaf = False
        self.busy: dict[str, int] = {}  # by decode node: its running requests, of at most 10

    async def look(self, router: str) -> GetClusterResponse:
        pages = {"free": 100}
        return GetClusterResponse(
            nodes=[
                ClusterNode(
                    role="prefill", address="p:1", state="ready", prompts=Backlog(queued_s=5.0)
                ),
                *(
                    ClusterNode(
                        role="decode",
                        address=address,
                        state="ready",
                        pages=pages,
                        queues={"on_device": self.busy.get(address, 0)},
                    )
                    for address in ("d:1", "d:2")
                ),
            ]
        )

    async def call_router(
        self, router: str, method: str, request: Any, longest_s: float = 10.0
    ) -> Any:
        if method == "ReportPlan":
            if self.deaf:
                raise UnfinishedRestart("it knows no such call")
            self.plans.append(request.plan)
            return ReportPlanResponse()
        self.moved.append((request.source, request.target))
        if len(self.moved) > 1:
            raise UnfinishedRestart("it has just ended")
        return MoveResponse(request_id="one", source=request.source, target=request.target)

    async def switch_node(self, address: str, role: str, longest_s: float) -> None:
        self.switched.append((address, role))


def planner_of(fleet: _Fleet, *flags: str) -> tuple[Planner, PlannerMetrics]:
    """Return a planner whose clock advances with each observation, and its metrics."""
    clock = partial(next, itertools.count(0.0, EVERY_S))
    options, metrics = parse(flags), PlannerMetrics()
    planner = Planner(
        cast(Fleet, fleet), metrics, rules_of(options), router="", act=options.act, clock=clock
    )
    return planner, metrics


@pytest.mark.parametrize("flags", [[], ["--act"]])
async def test_a_planner_acts_only_if_enabled(flags):
    fleet = _Fleet()
    planner, metrics = planner_of(fleet, *flags)
    for _ in range(16):
        decision = await planner.look()
    assert isinstance(decision, SwitchRoleAction) and (decision.address, decision.role) == (
        "d:1",
        "prefill",
    )
    assert fleet.switched == ([("d:1", "prefill")] if flags else [])
    value = metrics.registry.get_sample_value
    assert value("baton_planner_target_nodes", {"kind": "prefill"}) == 2
    assert value("baton_planner_target_nodes", {"kind": "decode"}) == 1
    assert value("baton_planner_decisions_total", {"decision": "switch"}) == 1
    assert value("baton_planner_role_changes_total", {"outcome": "completed"}) == len(flags)


@pytest.mark.parametrize("flags", [[], ["--act"]])
async def test_a_planner_migrates_requests_and_continues_after_a_failed_migration(flags):
    fleet = _Fleet()
    fleet.busy = {"d:1": 12, "d:2": 3}
    planner, metrics = planner_of(fleet, *flags, "--running=10")
    for _ in range(7):  # the last two of which have been observed long enough
        await planner.look()
    assert fleet.moved == ([("d:1", "d:2")] * 2 if flags else [])
    value = metrics.registry.get_sample_value
    assert value("baton_planner_decisions_total", {"decision": "move"}) == 1
    for outcome in ("completed", "failed"):
        assert value("baton_planner_rebalances_total", {"outcome": outcome}) == len(flags)


def test_a_planner_sees_only_the_nodes_of_its_model_which_must_be_named():
    models = [ModelState(name="a"), ModelState(name="b")]
    nodes = [ClusterNode(role="decode", address=f"{name}:1", served_model=name) for name in "ab"]
    cluster = GetClusterResponse(router=RouterState(models=models), nodes=nodes)
    assert [each.address for each in look_of(cluster, 0.0, "b").nodes] == ["b:1"]
    check_model("b", cluster)
    for wrong in ("", "c"):
        with pytest.raises(ConfigError, match="serves 'a', 'b'"):
            check_model(wrong, cluster)


@pytest.mark.parametrize("flags", [[], ["--act"]])
async def test_a_planner_reports_observations_decisions_and_actions_to_its_router(flags):
    fleet = _Fleet()
    fleet.deaf = True  # until after the decision
    planner, _ = planner_of(fleet, *flags)
    for _ in range(16):
        await planner.look()
    assert fleet.switched == ([("d:1", "prefill")] if flags else [])
    fleet.deaf = False
    for _ in range(2):
        await planner.look()
    reported, then = fleet.plans
    assert reported.acts is bool(flags)
    assert set(reported.pressures) == {"prefill", "decode"} and reported.pressures["prefill"] == 2.0
    done, decided = ("d:1 becomes a prefill node", "d:1 should become a prefill node")
    waits, *events = reversed(reported.events)
    assert (waits.what, waits.because) == ("waiting", "the nodes changed less than 30 s ago")
    assert [event.what for event in events][:2] == ([decided, done] if flags else [decided])
    assert events[0].because.startswith("prefill nodes have 2.00 of their maximum load")
    assert not then.events  # each once
