"""baton drain ADDRESS: a node or router takes nothing new, its requests finish or go on elsewhere,
and it ends. Returns then.

Whoever keeps it decides whether it is started again: `baton up` and Kubernetes do. To be rid of a
node take it off the router's list first, or scale its StatefulSet.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from cli import client
from cli.operating import command, restart_steps
from cli.operating.fleet import Fleet, UnfinishedRestart
from common.process.standard_output import say


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command.parser("drain", __doc__, "it has not ended")
    parser.add_argument(
        "address", type=client.address, metavar="ADDRESS", help="HOST:PORT, as the router has it"
    )
    client.add_router_flag(parser)
    command.add_flags(parser)
    return parser.parse_args(arguments)


async def drain(options: argparse.Namespace, fleet: Fleet) -> None:
    """Drain the node or router at the given address. Raises UnfinishedRestart."""
    look = await fleet.look(options.router)
    routers = {options.router: look.router}
    # A router with several worker processes ends as a whole.
    every = [replace(turn, processes=1) for turn in restart_steps.turns(look, routers)]
    wanted = [turn for turn in every if turn.address == options.address]
    if not wanted:
        known = ", ".join(f"{turn.role} {turn.address}" for turn in every)
        raise UnfinishedRestart(f"the router knows no node at {options.address}; it knows {known}")
    (turn,) = wanted
    say(turn.sentence)
    command.heed(restart_steps.objections(every, wanted, routers), options)
    if options.dry_run:
        return
    began = time.monotonic()
    if turn.node is None:
        await fleet.drain_router(turn.address, in_turn=False)
        await fleet.until_router_ended(turn.address, began, options.timeout)
    else:
        await fleet.drain_node(turn.address)
        await fleet.until_ended(options.router, turn.node, options.timeout)
    say(f"{turn.role} {turn.address} has ended after {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    options = parse()
    sys.exit(command.run("baton drain", options, partial(drain, options)))
