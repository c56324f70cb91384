"""The restart order of a cluster's processes, and objections to it. Pure functions."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from protos.router_pb2 import ClusterNode, GetClusterResponse, RouterState

NODES = ("prefill", "decode")
ROLES = (*NODES, "router")  # in this order


@dataclass(frozen=True, slots=True)
class RestartStep:
    """One process that ends, and returns before the next one ends."""

    role: str
    address: str
    remark: str  # effect on its requests
    node: ClusterNode | None = None  # None: it is a router
    processes: int = 1  # worker processes of a router, which end one after the other

    @property
    def reachable(self) -> bool:
        return self.node is None or self.node.state != "unreachable"

    @property
    def sentence(self) -> str:
        in_turn = f", {self.processes} processes, one at a time" if self.processes > 1 else ""
        return f"{self.role} {self.address}: {self.remark}{in_turn}"


def turns(cluster: GetClusterResponse, routers: Mapping[str, RouterState]) -> list[RestartStep]:
    """Return the turns of all processes.

    Args:
        routers: by address.
    """
    nodes = sorted(cluster.nodes, key=lambda node: (ROLES.index(node.role), node.address))
    found = [RestartStep(node.role, node.address, _of_node(node, cluster), node) for node in nodes]
    for address, state in routers.items():
        found.append(
            RestartStep("router", address, _of_router(state), processes=max(1, state.processes))
        )
    return found


def objections(
    all_turns: list[RestartStep],
    wanted: list[RestartStep],
    routers: Mapping[str, RouterState],
) -> Iterator[str]:
    """Return one sentence for each reason why requests would fail.

    Args:
        all_turns: turns of every process; `wanted` are the ones to drain.
    """
    for turn in all_turns:
        state = turn.node.state if turn.node is not None else routers[turn.address].state
        if state != "ready":
            yield f"{turn.role} {turn.address} is {state or 'silent'}"
    for role in dict.fromkeys(turn.role for turn in wanted):
        alike = [turn for turn in all_turns if turn.role == role]
        if len(alike) == 1 and alike[0].processes == 1:
            yield f"{role} {alike[0].address} is the only one: requests fail while it is away"


def objections_to_switch(nodes: list[RestartStep], turn: RestartStep) -> Iterator[str]:
    """Return one sentence for each reason why requests would fail if the node changed its role."""
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
        if each.role == node.role and each.state == "ready" and each.address != node.address
    ]
    if node.role == "prefill" or not others:
        return f"{requests} to finish here"
    held = node.pages.get("request", 0)
    room = sum(each.pages.get("free", 0) + each.pages.get("cache", 0) for each in others)
    if held <= room:
        return f"{requests} to continue elsewhere"
    return f"{requests}, whose {held} pages exceed the {room} elsewhere: some are recomputed"


def _of_router(state: RouterState) -> str:
    count = state.live_requests
    return f"{count} request{'' if count == 1 else 's'} to finish here"
