"""Between which decode nodes a request should move, where one has too much and another has room.
Pure.

Requests stay where they have come to, so what routers spread evenly need not stay even: a node that
has taken another role begins with nothing, and long answers meet at random. One request is moved at
a time, and none to where it would be as much too much.
"""

from collections.abc import Sequence
from statistics import fmean

from cli.planner.looks import Look, NodeFigures
from cli.planner.pressure import Limits, of_decode

_FEWER = 2  # requests that the other one must have less: else the two would change places


def uneven(
    looks: Sequence[Look], limits: Limits, spare: float
) -> tuple[NodeFigures, NodeFigures] | None:
    """The node that should give a request away, and the one that should have it; both have been
    like that in all of these looks, in the mean.

    Args:
        looks: at the same nodes.
        spare: most pressure of a node that has room.
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
