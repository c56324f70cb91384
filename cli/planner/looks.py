"""One look at a cluster, reduced to plain numbers for planning. Immutable."""

from dataclasses import dataclass

from protos.router_pb2 import ClusterNode, GetClusterResponse

ROLES = ("prefill", "decode")
_WAITING = ("prealloc", "waiting", "retracted")  # decode queues for requests without pages


@dataclass(frozen=True, slots=True)
class NodeFigures:
    """The figures that a node reports.

    Attributes:
        instance: changes when the node starts or changes its role.
        queued_s: seconds until the queued prompts are computed.
        token_s: seconds for each prompt token; 0.0: no request has waited long enough to measure
            it.
        prompt_tokens: prompt tokens accepted since the instance began.
        occupied: share of its pages that requests hold.
        running, coming, waiting: requests of a decode node that are computed, that are in hand-off,
            and that have no pages.
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
    """The nodes of a cluster at one moment.

    Attributes:
        at: seconds, by one clock for all looks.
        nodes: by address.
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


def look_of(cluster: GetClusterResponse, at: float) -> ClusterSnapshot:
    """Return a look from a router's description of its cluster."""
    nodes = sorted(cluster.nodes, key=lambda node: node.address)
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
