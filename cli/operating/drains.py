"""Commands that drain processes in a safe order: `nodes drain`, `nodes set-role`, `rollout`."""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cli import client
from cli.client import UnfinishedRestart
from cli.local import plan
from cli.operating import command
from cli.operating.command import Operation, Result, report
from cli.operating.fleet import Fleet, paired
from protos.router_pb2 import ClusterNode, GetClusterResponse, RouterState

NODES = ("prefill", "decode")
ROLES = ("encode", *NODES, "router")  # order of a rollout


@dataclass(frozen=True, slots=True)
class RestartStep:
    """One process to restart. It must be back before the next step."""

    role: str
    address: str
    remark: str  # effect on requests
    node: ClusterNode | None = None  # None: it is a router
    processes: int = 1  # worker processes of a router, which are restarted one after the other

    @property
    def model(self) -> str:
        """Return the name of the served model. Empty for a router."""
        return self.node.served_model if self.node is not None else ""

    @property
    def reachable(self) -> bool:
        return self.node is None or self.node.state != "unreachable"

    @property
    def sentence(self) -> str:
        in_turn = f", {self.processes} processes, one at a time" if self.processes > 1 else ""
        return f"{self.role} {self.address}: {self.remark}{in_turn}"


def turns(cluster: GetClusterResponse, routers: Mapping[str, RouterState]) -> list[RestartStep]:
    """Return the steps to restart all processes, in order.

    Args:
        routers: state of each router by address.
    """
    nodes = sorted(cluster.nodes, key=lambda node: (ROLES.index(node.role), node.address))
    found = [RestartStep(node.role, node.address, _of_node(node, cluster), node) for node in nodes]
    for address, state in routers.items():
        found.append(
            RestartStep("router", address, _of_router(state), processes=max(1, state.processes))
        )
    return found


def find_objections(
    all_turns: list[RestartStep],
    wanted: list[RestartStep],
    routers: Mapping[str, RouterState],
) -> Iterator[str]:
    """Yield one sentence for each reason why requests would fail.

    Args:
        all_turns: steps of all processes. `wanted` are the steps to execute.
    """
    for turn in all_turns:
        state = turn.node.state if turn.node is not None else routers[turn.address].state
        if state != "ready":
            yield f"{turn.role} {turn.address} is {state or 'silent'}"
    for role, model in dict.fromkeys((turn.role, turn.model) for turn in wanted):
        alike = [turn for turn in all_turns if (turn.role, turn.model) == (role, model)]
        # Without encode nodes, prefill nodes encode images themselves.
        if len(alike) == 1 and alike[0].processes == 1 and role != "encode":
            yield f"{role} {alike[0].address} is the only one: requests fail while it is away"


def objections_to_switch(nodes: list[RestartStep], turn: RestartStep) -> Iterator[str]:
    """Yield one sentence for each reason why requests would fail if the node changed its role."""
    for each in nodes:
        if each.node is not None and each.node.state != "ready":
            yield f"{each.role} {each.address} is {each.node.state or 'silent'}"
    if not any(each.role == turn.role and each is not turn for each in nodes):
        yield f"{turn.role} {turn.address} is the only one: no {turn.role} node would be left"


def _of_node(node: ClusterNode, cluster: GetClusterResponse) -> str:
    count = sum(node.queues.values())
    requests = f"{count} request{'' if count == 1 else 's'}"
    others = [
        each
        for each in cluster.nodes
        if (each.role, each.served_model) == (node.role, node.served_model)
        and each.state == "ready"
        and each.address != node.address
    ]
    if node.role != "decode" or not others:
        return f"{requests} to finish here"
    held = node.pages.get("request", 0)
    room = sum(each.pages.get("free", 0) + each.pages.get("cache", 0) for each in others)
    if held <= room:
        return f"{requests} to continue elsewhere"
    return f"{requests}, whose {held} pages exceed the {room} elsewhere: some are recomputed"


def _of_router(state: RouterState) -> str:
    count = state.live_requests
    return f"{count} request{'' if count == 1 else 's'} to finish here"


def _beside(step: RestartStep, steps: Sequence[RestartStep]) -> list[RestartStep]:
    """Return the routers, and the nodes of the step's model. A router serves all models."""
    if step.node is None:
        return list(steps)
    return [each for each in steps if each.node is None or each.model == step.model]


_address = client.flag(
    "address",
    type=client.address,
    metavar="ADDRESS",
    help="HOST:PORT of the process, as the router knows it",
)
_role = client.flag("role", choices=NODES, metavar="ROLE", help="prefill or decode")
_routers = client.flag(
    "--router",
    type=client.address,
    action="append",
    metavar="HOST:PORT",
    help="gRPC address of a router. Repeat it for each router of the cluster "
    f"({plan.HOST}:{plan.ROUTER_PORT})",
)
_only = client.flag(
    "--only",
    action="append",
    choices=ROLES,
    help="processes of this role. May be repeated (all roles)",
)
_DRAIN_FLAGS = (_address, client.add_router_flag, command.add_drain_flags)


async def _drain(options: argparse.Namespace, fleet: Fleet) -> Result:
    look = await fleet.look(options.router)
    routers = {options.router: look.router}
    # A router with several worker processes is drained as a whole.
    every = [replace(step, processes=1) for step in turns(look, routers)]
    step = _at(options.address, every)
    report(options, step.sentence)
    objections = find_objections(_beside(step, every), [step], routers)
    found = command.check_objections(objections, options)
    if options.dry_run:
        return _planned([step], found)
    began = time.monotonic()
    if step.node is None:
        await fleet.drain_router(step.address, in_turn=False)
        await fleet.until_router_ended(step.address, began, options.timeout)
    else:
        await fleet.drain_node(step.address)
        await fleet.until_ended(options.router, step.node, options.timeout)
    took_s = time.monotonic() - began
    text = f"{step.role} {step.address} has ended after {took_s:.1f} s"
    return Result(text, {**_of(step), "seconds": took_s})


async def _set_role(options: argparse.Namespace, fleet: Fleet) -> Result:
    look = await fleet.look(options.router)
    nodes = turns(look, {})
    step = _at(options.address, nodes)
    assert step.node is not None
    if step.role == options.role:
        raise UnfinishedRestart(f"{step.address} already is a {step.role} node")
    report(options, step.sentence)
    objections = objections_to_switch(_beside(step, nodes), step)
    found = command.check_objections(objections, options, "the role is not changed")
    if options.dry_run:
        return _planned([step], found)
    began = time.monotonic()
    await fleet.switch_node(step.address, options.role, options.timeout)
    await fleet.until_has_role(options.router, step.node, options.role, options.timeout)
    took_s = time.monotonic() - began
    text = f"{step.address} is a {options.role} node after {took_s:.1f} s"
    return Result(text, {**_of(step), "role": options.role, "seconds": took_s})


async def _rollout(options: argparse.Namespace, fleet: Fleet) -> Result:
    addresses = options.router or [f"{plan.HOST}:{plan.ROUTER_PORT}"]
    looks = {router: await fleet.look(router) for router in addresses}
    cluster = looks[addresses[0]]
    routers: Mapping[str, RouterState] = {router: look.router for router, look in looks.items()}
    every = turns(cluster, routers)
    wanted = [step for step in every if step.role in (options.only or ROLES)]
    for step in wanted:
        report(options, step.sentence)
    objections = find_objections(every, wanted, routers)
    found = command.check_objections(objections, options)
    if options.dry_run:
        return _planned(wanted, found)
    restarted = []
    reachable = [step for step in wanted if step.reachable]
    for number, step in enumerate(reachable, 1):
        began = time.monotonic()
        place = f"{number}/{len(reachable)} {step.role} {step.address}"
        report(options, f"{place} drains")
        await _restart(step, cluster, fleet, addresses, options.timeout)
        took_s = time.monotonic() - began
        report(options, f"{place} is back after {took_s:.1f} s")
        restarted.append({**_of(step), "seconds": took_s})
    return Result("", {"restarted": restarted})


async def _restart(
    step: RestartStep,
    cluster: GetClusterResponse,
    fleet: Fleet,
    routers: Sequence[str],
    longest_s: float,
) -> None:
    """Restart one process and wait until its replacement serves."""
    if step.node is None:
        since = time.monotonic()
        await fleet.drain_router(step.address, in_turn=step.processes > 1)
        models = [each.name for each in cluster.router.models if each.state == "ready"]
        await fleet.until_router_back(step.address, since, longest_s, models)
        return
    pairs = frozenset(pair for pair in paired(cluster) if step.address in pair)
    await fleet.drain_node(step.address)
    await fleet.until_ended(routers[0], step.node, longest_s)
    await fleet.until_back(routers, step.node, pairs, longest_s)


def _at(address: str, steps: Sequence[RestartStep]) -> RestartStep:
    """Return the step of the process at this address. Raises UnfinishedRestart if there is none."""
    for step in steps:
        if step.address == address:
            return step
    known = ", ".join(f"{step.role} {step.address}" for step in steps)
    raise UnfinishedRestart(f"the router knows no process at {address}. It knows {known}")


def _of(step: RestartStep) -> dict[str, Any]:
    return {"role": step.role, "address": step.address}


def _planned(steps: Sequence[RestartStep], objections: Sequence[str]) -> Result:
    listed = [{**_of(step), "effect": step.remark} for step in steps]
    return Result("", {"steps": listed, "warnings": list(objections)})


DRAINS = {
    "nodes drain": Operation(
        details="The process accepts no new requests. Its requests finish or continue elsewhere, "
        "and it ends. Its supervisor (`baton up`, Kubernetes, a service manager) may start it "
        "again. To remove a node, first remove it from the node list of the router.",
        undone="the process has not ended",
        flags=_DRAIN_FLAGS,
        work=_drain,
    ),
    "nodes set-role": Operation(
        details="The node keeps its weights, its prefix cache and its address. Its requests finish "
        "or continue elsewhere. When its process is restarted, it has its first role again.",
        undone="the node has not changed its role",
        flags=(*_DRAIN_FLAGS, _role),
        work=_set_role,
    ),
    "rollout": Operation(
        details="Each process is drained, and its supervisor (`baton up`, Kubernetes, a service "
        "manager) starts it again. The next one is drained once it is ready and paired as before. "
        "No request fails if there are two nodes of each role and two routers or router processes.",
        undone="a process does not return, or requests could fail. No further process is drained",
        flags=(_routers, _only, command.add_drain_flags),
        work=_rollout,
    ),
}
