"""How much a role has to do, against what it can: 1.0 is as much as it should have. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from cli.planner.looks import Look, NodeFigures

_MOSTLY = 0.5
_FULL = 0.9  # one has just ended, and the next one is about to begin
_ALL_BUSY = 0.99  # who computes without a pause has enough to do, and too much where some wait


@dataclass(frozen=True, slots=True)
class Limits:
    """What a node has at a pressure of 1.0.

    Attributes:
        queued_s: of a prefill node, prompts that wait for so long.
        occupied: of a decode node, the share of its pages that requests hold.
        running: of a decode node, requests at once; 0: as many as it has pages for.
    """

    queued_s: float = 1.0
    occupied: float = 0.9
    running: int = 0


def pressure(role: str, looks: Sequence[Look], limits: Limits) -> float:
    """Of a role's nodes at the last of these looks, which all have the same nodes; what has become
    more is taken from the first to the last. Nodes share what there is, so it is their mean."""
    first, last = looks[0], looks[-1]
    nodes = last.of(role)
    if not nodes:
        return 0.0
    if role == "decode":
        return sum(of_decode(node, limits) for node in nodes) / len(nodes)
    before = {node.address: node for node in first.of(role)}
    seconds = last.at - first.at
    return sum(_of_prefill(n, before[n.address], seconds, limits) for n in nodes) / len(nodes)


def _of_prefill(node: NodeFigures, before: NodeFigures, seconds: float, limits: Limits) -> float:
    busy_s = (node.prompt_tokens - before.prompt_tokens) * node.token_s
    busy = min(_ALL_BUSY, busy_s / seconds) if seconds > 0 else 0.0
    return max(busy, node.queued_s / limits.queued_s)


def of_decode(node: NodeFigures, limits: Limits) -> float:
    """Of one decode node."""
    # Those that come wait for prefill nodes, with pages: that is not this node's doing, unless it
    # has as many running as it may.
    share = node.running / max(1, node.running + node.coming)
    by_pages = node.occupied * share / limits.occupied
    if node.waiting and share >= _MOSTLY:  # as if those that run had as many more
        by_pages = max(by_pages, (node.running + node.waiting) / node.running)
    if not limits.running:
        return by_pages
    full = node.running >= _FULL * limits.running
    demand = node.running + (node.coming + node.waiting if full else 0)
    return max(by_pages, demand / limits.running)
