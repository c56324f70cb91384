"""Load of a role relative to its capacity. At 1.0 it has as much as it should have. Pure
functions."""

from collections.abc import Sequence
from dataclasses import dataclass

from cli.planner.looks import ClusterSnapshot, NodeFigures

_MOSTLY = 0.5
_FULL = 0.9  # a slot may be free for a moment between two requests
_ALL_BUSY = 0.99  # a node without idle time is at capacity, and above it if requests wait


@dataclass(frozen=True, slots=True)
class PressureThresholds:
    """The load of a node at a pressure of 1.0.

    Attributes:
        queued_s: of a prefill node, queueing time of prompts.
        occupied: of a decode node, the share of its pages that requests hold.
        running: of a decode node, requests at once; 0: as many as it has pages for.
    """

    queued_s: float = 1.0
    occupied: float = 0.9
    running: int = 0


def pressure(role: str, looks: Sequence[ClusterSnapshot], limits: PressureThresholds) -> float:
    """Return the mean pressure of a role's nodes at the last of these looks.

    All looks must have the same nodes. Counters are compared between the first and the last look.
    The nodes share the load, so their mean counts.
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
    """Return the pressure of one decode node."""
    # Requests in hand-off hold pages while they wait for prefill nodes. They count only if this
    # node runs as many requests as it may.
    share = node.running / max(1, node.running + node.coming)
    by_pages = node.occupied * share / limits.occupied
    if node.waiting and share >= _MOSTLY:  # as if the running requests were that many more
        by_pages = max(by_pages, (node.running + node.waiting) / node.running)
    if not limits.running:
        return by_pages
    full = node.running >= _FULL * limits.running
    demand = node.running + (node.coming + node.waiting if full else 0)
    return max(by_pages, demand / limits.running)
