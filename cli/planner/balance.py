"""Choice of the decode nodes between which a request should migrate: one overloaded, one with
capacity. Pure functions.

Requests stay where they were placed, so an even placement need not stay even: a node that has
changed its role starts empty, and long responses collect at random. Requests migrate one at a time,
and never to a node that would then be as overloaded.
"""

from collections.abc import Sequence
from statistics import fmean

from cli.planner.looks import ClusterSnapshot, NodeFigures
from cli.planner.pressure import PressureThresholds, of_decode

_FEWER = 2  # minimum difference in requests: with less, the two would only change places


def uneven(
    looks: Sequence[ClusterSnapshot], limits: PressureThresholds, spare: float
) -> tuple[NodeFigures, NodeFigures] | None:
    """Return the node that should give a request away, and the one that should receive it.

    Both must match in the mean of all of these looks.

    Args:
        looks: looks that contain the same nodes.
        spare: maximum pressure of a node with capacity.
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
