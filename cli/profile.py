"""baton profile: torch's profiler watches the next steps of all nodes, or of one, and each writes a
trace below its engine.profile_dir. Returns once they are written."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from functools import partial

from cli.operating import command
from cli.operating.fleet import Fleet
from common.process.standard_output import say
from protos.router_pb2 import StartProfileRequest, StopProfileRequest

_LONGEST_S = 90.0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command.parser("profile", __doc__, "one of them is not profiled")
    parser.add_argument(
        "--seconds",
        type=float,
        default=5.0,
        metavar="S",
        help="after which it ends, whatever the steps (%(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        choices=range(1, 1001),
        default=20,
        metavar="N",
        help="of each node, 1 to 1000 (%(default)s)",
    )
    command.add_one_or_all(parser)
    return parser.parse_args(arguments)


async def profile(options: argparse.Namespace, fleet: Fleet) -> None:
    """Profile the selected nodes. Raises Undone."""
    begin = StartProfileRequest(num_steps=options.steps)
    await command.tell(options, fleet, "StartProfile", begin, _LONGEST_S)
    await asyncio.sleep(options.seconds)
    written = await command.tell(options, fleet, "StopProfile", StopProfileRequest(), _LONGEST_S)
    if options.address is not None:
        say(written.path)
        return
    for each in written.profiles:
        say(f"{each.role} {each.address}: {each.path}")


if __name__ == "__main__":
    options = parse()
    sys.exit(command.run("baton profile", options, partial(profile, options)))
