"""baton switch ADDRESS ROLE: a node takes the other role, and keeps its weights and its cache.

It takes nothing new, its requests finish or go on elsewhere, and it begins anew in that role, at
the same address. What neither ends nor moves in time goes on where it is, and so does the node.
When its program is started again it has the role of its command line.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial

from cli import client
from cli.operating import command, restart_steps
from cli.operating.fleet import Fleet, UnfinishedRestart
from common.process.standard_output import say


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command.parser("switch", __doc__, "it has not taken the role")
    parser.add_argument(
        "address", type=client.address, metavar="ADDRESS", help="HOST:PORT, as the router has it"
    )
    parser.add_argument(
        "role", choices=restart_steps.NODES, metavar="ROLE", help="prefill or decode"
    )
    client.add_router_flag(parser)
    command.add_flags(parser)
    return parser.parse_args(arguments)


async def switch(options: argparse.Namespace, fleet: Fleet) -> None:
    """Change a node's role. Raises UnfinishedRestart."""
    look = await fleet.look(options.router)
    nodes = restart_steps.turns(look, {})
    wanted = [turn for turn in nodes if turn.address == options.address]
    if not wanted:
        known = ", ".join(f"{turn.role} {turn.address}" for turn in nodes)
        raise UnfinishedRestart(f"the router knows no node at {options.address}; it knows {known}")
    (turn,) = wanted
    assert turn.node is not None
    if turn.role == options.role:
        raise UnfinishedRestart(f"{turn.address} is a {turn.role} node already")
    say(turn.sentence)
    command.heed(restart_steps.objections_to_switch(nodes, turn), options, "nothing is switched")
    if options.dry_run:
        return
    began = time.monotonic()
    await fleet.switch_node(turn.address, options.role, options.timeout)
    await fleet.until_has_role(options.router, turn.node, options.role, options.timeout)
    took_s = time.monotonic() - began
    say(f"{turn.address} is a {options.role} node after {took_s:.1f} s")


if __name__ == "__main__":
    options = parse()
    sys.exit(command.run("baton switch", options, partial(switch, options)))
