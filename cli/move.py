"""baton move REQUEST [TARGET]: a running request goes on at another decode node. Its client sees a
pause of some steps, and nothing is computed again.

REQUEST is its id, as the router lists it (GET /requests). Without TARGET it goes where the router's
policy would have it.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from cli import client
from cli.operating import command
from cli.operating.fleet import Fleet
from common import settings
from common.process.standard_output import say
from protos.router_pb2 import MoveRequest

_LONGEST_S = 60.0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = settings.ConfigArgumentParser(
        prog="baton move",
        description=__doc__,
        epilog=f"Exits with {command.EXIT_UNDONE} if it stays where it is, or nobody has it.",
    )
    parser.add_argument("request", metavar="REQUEST", help="its id")
    parser.add_argument(
        "target",
        nargs="?",
        default="",
        type=client.address,
        metavar="TARGET",
        help="HOST:PORT of a decode node, as the router has it (any)",
    )
    client.add_router_flag(parser)
    command.add_identity_flags(parser)
    return parser.parse_args(arguments)


async def move(options: argparse.Namespace, fleet: Fleet) -> None:
    """Migrate the request that `options` name. Raises Undone."""
    order = MoveRequest(request_id=options.request, target=options.target)
    moved = await fleet.tell_router(options.router, "Move", order, _LONGEST_S)
    say(f"{moved.request_id} has moved from {moved.source} to {moved.target}")


if __name__ == "__main__":
    options = parse()
    sys.exit(command.run("baton move", options, partial(move, options)))
