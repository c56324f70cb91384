"""One look at a cluster, as far as plans are made of it. Immutable, and made of plain numbers."""

from dataclasses import dataclass

from protos.router_pb2 import ClusterNode, GetClusterResponse

ROLES = ("prefill", "decode")
_WAITING = ("prealloc", "waiting", "retracted")  # queues of a decode node: they have no pages


@dataclass(frozen=True, slots=True)
class NodeFigures:
    """What a node says of itself.

    Attributes:
        instance: new when it starts, and when it takes another role.
        queued_s: until the prompts that wait there are computed.
        token_s: that a prompt token takes; 0.0: nothing has waited for long enough to tell.
        prompt_tokens: that it has taken up, since the instance began.
        occupied: share of its pages that requests hold.
        running, coming, waiting: requests of a decode node that it computes, whose prompts are
            being handed over, and that have no pages.
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
class Look:
    """
    Attributes:
        at: seconds, by one clock for all looks.
        nodes: by address.
    """

    at: float
    nodes: tuple[NodeFigures, ...]

    @property
    def roster(self) -> tuple[tuple[str, str, int, str], ...]:
        """What a change of the cluster changes."""
        return tuple((node.address, node.role, node.instance, node.state) for node in self.nodes)

    def of(self, role: str) -> list[NodeFigures]:
        """Those that serve in a role."""
        return [node for node in self.nodes if node.role == role and node.state == "ready"]


def look_of(cluster: GetClusterResponse, at: float) -> Look:
    """What a router says of its cluster."""
    nodes = sorted(cluster.nodes, key=lambda node: node.address)
    return Look(at, tuple(_figures(node) for node in nodes))


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
