"""baton sleep: nodes give the memory of their KV, their weights or both back to the system, until
`baton wake`. They have no requests, or are paused (`baton pause`); meanwhile all stay so."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from cli.operating import command
from cli.operating.fleet import Fleet
from common.memory_tags import MEMORY_TAGS
from common.process.standard_output import say
from protos.router_pb2 import ReleaseMemoryRequest

_LONGEST_S = 1500.0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command.parser("sleep", __doc__, "not all of them have; then none has")
    parser.add_argument("--only", choices=MEMORY_TAGS, help="this part of it (all)")
    command.add_one_or_all(parser)
    return parser.parse_args(arguments)


async def sleep(options: argparse.Namespace, fleet: Fleet) -> None:
    """Raises Undone."""
    request = ReleaseMemoryRequest(tags=[options.only] if options.only else ())
    await command.tell(options, fleet, "ReleaseMemory", request, _LONGEST_S)
    say("given back")


if __name__ == "__main__":
    options = parse()
    sys.exit(command.run("baton sleep", options, partial(sleep, options)))
