"""`baton planner`: recommends roles and numbers of nodes, and changes roles with --act."""

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from cli import client
from cli.client import UnfinishedRestart
from cli.operating import command
from cli.operating.command import Result
from cli.operating.fleet import Fleet
from cli.planner.decide import (
    ROLES,
    AddNodeAction,
    ClusterSnapshot,
    Decision,
    NoAction,
    PlannerRules,
    PressureThresholds,
    RemoveNodeAction,
    ShiftCapacityAction,
    SwitchRoleAction,
    WaitAction,
    decide,
    look_of,
    pressures,
)
from cli.planner.metrics import Decided, PlannerMetrics
from common import logs, settings
from common.errors import ConfigError
from common.logs import kv
from common.metrics.serving import served
from protos.router_pb2 import GetClusterResponse, MoveRequest, Plan, PlanEvent, ReportPlanRequest

log = logging.getLogger(__name__)

# Limits of a router: events in one report, and characters of a text.
_MOST_EVENTS = 16
_MOST_CHARACTERS = 512


class DecisionLog:
    """Decisions that are not yet reported to the router. For one event loop.

    Args:
        acts: the planner carries out its decisions.
        model: name of the served model. Empty: the only one.
    """

    def __init__(
        self,
        fleet: Fleet,
        router: str,
        *,
        acts: bool,
        model: str = "",
    ) -> None:
        self._fleet = fleet
        self._router = router
        self._acts = acts
        self._model = model
        self._unreported: deque[tuple[float, str, str]] = deque(maxlen=_MOST_EVENTS)
        self._refusal = ""

    def note(self, what: str, because: str) -> None:
        """Queue an event. It is sent with each report until the router has accepted it."""
        event = what[:_MOST_CHARACTERS], because[:_MOST_CHARACTERS]
        self._unreported.append((time.monotonic(), *event))

    async def report(self, pressures: Mapping[str, float]) -> None:
        """Report the latest look to the router. The planner continues if the router rejects it."""
        now = time.monotonic()
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


_KINDS: dict[type[Decision], Decided] = {
    SwitchRoleAction: "switch",
    ShiftCapacityAction: "move",
    AddNodeAction: "add",
    RemoveNodeAction: "remove",
}
_MOVE_S = 30.0


PROGRAM = "baton planner"


def parser() -> settings.ConfigArgumentParser:
    parser = settings.ConfigArgumentParser(
        prog=PROGRAM,
        description="Watch a cluster, and recommend which nodes should change their role and how "
        "many nodes there should be. Decisions and reasons appear in the log, on the router's page "
        "and in metrics. The planner starts and ends no nodes. An autoscaler can read the metric "
        "baton_planner_target_nodes.",
    )
    client.add_router_flag(parser)
    client.add_model_flag(parser)
    parser.add_argument(
        "--act",
        action="store_true",
        help="change the roles of nodes, and migrate requests from overloaded decode nodes",
    )
    parser.add_argument("--host", default="127.0.0.1", help="host of metrics (%(default)s)")
    parser.add_argument("--metrics-port", type=int, help="port of Prometheus metrics (none)")
    parser.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="log format (%(default)s)"
    )
    group = parser.add_advanced_group("decisions", "Thresholds and times of decisions.")
    rules, limits = PlannerRules(), PressureThresholds()
    for flag, default, what in (
        ("every-s", 2.0, "seconds between two observations"),
        ("queued-s", limits.queued_s, "seconds that prompts may wait at a prefill node"),
        ("occupied", limits.occupied, "maximum share of a decode node's pages held by requests"),
        ("spare", rules.spare, "maximum pressure of the remaining nodes of a role, below 1"),
        ("sustained-s", rules.sustained_s, "seconds over which pressure is averaged"),
        ("settle-s", rules.settle_s, "seconds between two changes of the cluster"),
        (
            "idle-s",
            rules.idle_s,
            "seconds that a node must be unneeded before its removal",
        ),
    ):
        group.add_argument(
            f"--{flag}", type=client.positive, default=default, help=f"{what} (%(default)g)"
        )
    group.add_argument(
        "--running",
        type=client.ranged(int, 0),
        default=limits.running,
        help="maximum requests of a decode node. 0: limited by its pages (%(default)s)",
    )
    client.add_credential_flags(parser)
    parser.set_defaults(json=False)  # its output is the log
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    options = parser().parse_args(arguments)
    if options.spare >= 1:
        settings.wrong(PROGRAM, "--spare must be below 1, or roles would change back and forth")
    return options


def rules_of(options: argparse.Namespace) -> PlannerRules:
    return PlannerRules(
        limits=PressureThresholds(options.queued_s, options.occupied, options.running),
        spare=options.spare,
        sustained_s=options.sustained_s,
        settle_s=options.settle_s,
        idle_s=options.idle_s,
    )


class Planner:
    """The planning loop. For one event loop.

    Args:
        router: router whose view of the cluster counts.
        act: change roles of nodes and migrate requests.
        model: name of the served model whose nodes are planned. Empty: the only one.
    """

    def __init__(
        self,
        fleet: Fleet,
        metrics: PlannerMetrics,
        rules: PlannerRules,
        *,
        router: str,
        act: bool,
        model: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._rules = rules
        self._router = router
        self._act = act
        self._model = model
        self._account = DecisionLog(fleet, router, acts=act, model=model)
        self._clock = clock
        self._history: deque[ClusterSnapshot] = deque()
        self._logged = ""

    async def look(self) -> Decision:
        """Look at the cluster once, and carry out the decision, if any."""
        cluster = await self._fleet.look(self._router)
        check_model(self._model, cluster)
        seen = look_of(cluster, self._clock(), self._model)
        self._history.append(seen)
        oldest = seen.at - self._rules.idle_s - self._rules.sustained_s
        while self._history[0].at < oldest:
            self._history.popleft()
        history = tuple(self._history)
        decision = decide(history, self._rules)
        lately = pressures(history, self._rules)
        self._metrics.seen(lately, _wanted(seen, decision))
        self._log(decision)
        await self._account.report(lately)  # before the change, which takes a while
        if self._act:
            await self._carry_out(decision)
        return decision

    def _log(self, decision: Decision) -> None:
        """Log and report a decision if it differs from the previous one."""
        if _news(decision) != self._logged:
            log.info("%s %s", _what(decision), kv(reason=decision.because))
            self._account.note(_what(decision), decision.because)
            if (kind := _KINDS.get(type(decision))) is not None:
                self._metrics.decided(kind)
        self._logged = _news(decision)

    async def _carry_out(self, decision: Decision) -> None:
        """Change a role or migrate a request. All other decisions are left to the operator."""
        match decision:
            case SwitchRoleAction():
                await self._switch(decision)
            case ShiftCapacityAction():
                await self._move(decision)

    async def _move(self, decision: ShiftCapacityAction) -> None:
        order = MoveRequest(source=decision.source, target=decision.target)
        try:
            moved = await self._fleet.call_router(self._router, "Move", order, _MOVE_S)
        except UnfinishedRestart as undone:
            self._metrics.moved(done=False)
            log.warning("migration failed %s", kv(node=decision.source, reason=undone))
            self._account.note(f"no request of {decision.source} was moved", str(undone))
        else:
            self._metrics.moved(done=True)
            fields = kv(request=moved.request_id, node=moved.source, to=moved.target)
            log.info("request migrated %s", fields)
            self._account.note(f"{moved.request_id} has moved to {moved.target}", "")

    async def _switch(self, decision: SwitchRoleAction) -> None:
        began = self._clock()
        try:
            await self._fleet.switch_node(decision.address, decision.role, command.LONGEST_S)
        except UnfinishedRestart as undone:
            self._metrics.switched(done=False)
            log.warning("role change failed %s", kv(node=decision.address, reason=undone))
            self._account.note(f"{decision.address} keeps its role", str(undone))
        else:
            self._metrics.switched(done=True)
            took_s = round(self._clock() - began, 1)
            log.info("role changed %s", kv(node=decision.address, to=decision.role, seconds=took_s))
            self._account.note(f"{decision.address} becomes a {decision.role} node", "")
        self._history.clear()  # later decisions use only looks after this change
        self._logged = ""


def check_model(model: str, cluster: GetClusterResponse) -> None:
    """Raise ConfigError if the model is unknown, or missing although the router has several."""
    names = [each.name for each in cluster.router.models]
    if model not in names and (model or len(names) > 1):
        given = f"there is no {model!r}" if model else "required"
        raise ConfigError(f"--model: {given}. The router serves {', '.join(map(repr, names))}")


def _what(decision: Decision) -> str:
    match decision:
        case SwitchRoleAction(address, role):
            return f"{address} should become a {role} node"
        case ShiftCapacityAction(source, target):
            return f"a request of {source} should migrate to {target}"
        case AddNodeAction(role):
            return f"one more {role} node is needed"
        case RemoveNodeAction(address, role):
            return f"{role} node {address} is not needed"
        case NoAction():
            return "no action needed"
        case WaitAction():
            return "waiting"


def _news(decision: Decision) -> str:
    """Return what identifies a decision, without figures that change at each look."""
    match decision:
        case WaitAction(because):
            return because
        case _:
            return _what(decision)


def _wanted(look: ClusterSnapshot, decision: Decision) -> dict[str, int]:
    wanted = {role: len(look.of(role)) for role in ROLES}
    match decision:
        case SwitchRoleAction(role=role):
            wanted = {each: n + (1 if each == role else -1) for each, n in wanted.items()}
        case AddNodeAction(role):
            wanted[role] += 1
        case RemoveNodeAction(role=role):
            wanted[role] -= 1
    return wanted


async def plan(options: argparse.Namespace, metrics: PlannerMetrics, fleet: Fleet) -> None:
    """Run the planner until SIGTERM or SIGINT. A role change in progress completes without it."""
    rules = rules_of(options)
    planner = Planner(
        fleet, metrics, rules, router=options.router, act=options.act, model=options.model
    )
    log.info("watching %s", kv(router=options.router, acts=options.act))
    watching = asyncio.ensure_future(_watch(planner, options.every_s))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, watching.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await watching


async def _watch(planner: Planner, every_s: float) -> None:
    """Look at the cluster periodically. A router that does not respond is called again later."""
    silence = ""
    while True:
        try:
            await planner.look()
            silence = ""
        except UnfinishedRestart as undone:
            if str(undone) != silence:
                silence = str(undone)
                log.warning("the router does not respond %s", kv(reason=undone))
        await asyncio.sleep(every_s)


async def _run(options: argparse.Namespace, fleet: Fleet) -> Result:
    logs.setup("planner", "info", options.log_format)
    metrics = PlannerMetrics()
    with served(metrics.registry, options.host, options.metrics_port):
        await plan(options, metrics, fleet)
    return Result("", {})


if __name__ == "__main__":
    sys.exit(command.run(PROGRAM, parse(), _run))
