"""baton roll: restarts every program that a router knows, one after the other, and the router.

Each is drained: it takes nothing new, its requests finish or go on elsewhere, and it ends. Whoever
keeps it (`baton up`, a Kubernetes pod, a service manager) starts it again; the next one is drained
when it is ready and paired as before. Nobody notices where there are two of each role, and of
routers or their processes.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial

from cli import client
from cli.local import plan
from cli.operating import command, restart_steps
from cli.operating.fleet import Fleet, paired
from cli.operating.restart_steps import RestartStep
from common import settings
from common.process.standard_output import say
from protos.router_pb2 import GetClusterResponse


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = settings.ConfigArgumentParser(
        prog="baton roll",
        description=__doc__,
        epilog=f"Exits with {command.EXIT_UNDONE} if one does not come back, or anything speaks "
        "against it: nothing is drained any more then.",
    )
    parser.add_argument(
        "--router",
        type=client.address,
        action="append",
        metavar="HOST:PORT",
        help="its gRPC port; repeated for each router of the cluster "
        f"({plan.HOST}:{plan.ROUTER_PORT})",
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=restart_steps.ROLES,
        help="programs of this role; may be repeated (all)",
    )
    command.add_flags(parser)
    options = parser.parse_args(arguments)
    options.router = options.router or [f"{plan.HOST}:{plan.ROUTER_PORT}"]
    return options


async def roll(options: argparse.Namespace, fleet: Fleet) -> None:
    """Restart every process in turn. Raises Undone if one does not return or was not drained."""
    looks = {router: await fleet.look(router) for router in options.router}
    cluster = looks[options.router[0]]
    routers = {router: look.router for router, look in looks.items()}
    every = restart_steps.turns(cluster, routers)
    wanted = [turn for turn in every if turn.role in (options.only or restart_steps.ROLES)]
    for turn in wanted:
        say(turn.sentence)
    command.heed(restart_steps.objections(every, wanted, routers), options)
    if options.dry_run:
        return
    reachable = [turn for turn in wanted if turn.reachable]
    for number, turn in enumerate(reachable, 1):
        began = time.monotonic()
        say(f"{number}/{len(reachable)} {turn.role} {turn.address} drains")
        await _restart(turn, cluster, fleet, options)
        took_s = time.monotonic() - began
        say(f"{number}/{len(reachable)} {turn.role} {turn.address} is back after {took_s:.1f} s")


async def _restart(
    turn: RestartStep, cluster: GetClusterResponse, fleet: Fleet, options: argparse.Namespace
) -> None:
    """Restart one process and wait until its successor serves."""
    longest_s = options.timeout
    if turn.node is None:
        since = time.monotonic()
        await fleet.drain_router(turn.address, in_turn=turn.processes > 1)
        await fleet.until_router_back(turn.address, since, longest_s)
        return
    pairs = frozenset(pair for pair in paired(cluster) if turn.address in pair)
    await fleet.drain_node(turn.address)
    await fleet.until_ended(options.router[0], turn.node, longest_s)
    await fleet.until_back(options.router, turn.node, pairs, longest_s)


if __name__ == "__main__":
    options = parse()
    sys.exit(command.run("baton roll", options, partial(roll, options)))
