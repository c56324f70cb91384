"""baton wake: nodes take again what they have given back by `baton sleep`. Those that had to be
paused for that go on with `baton continue`, the others by themselves."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from cli.operating import command
from cli.operating.fleet import Fleet
from common.memory_tags import MEMORY_TAGS
from common.process.standard_output import say
from protos.router_pb2 import ResumeMemoryRequest

_LONGEST_S = 1500.0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command.parser("wake", __doc__, "one of them has not all of it")
    parser.add_argument("--only", choices=MEMORY_TAGS, help="this part of it (all)")
    command.add_one_or_all(parser)
    return parser.parse_args(arguments)


async def wake(options: argparse.Namespace, fleet: Fleet) -> None:
    """Raises Undone."""
    request = ResumeMemoryRequest(tags=[options.only] if options.only else ())
    await command.tell(options, fleet, "ResumeMemory", request, _LONGEST_S)
    say("taken again")


if __name__ == "__main__":
    options = parse()
    sys.exit(command.run("baton wake", options, partial(wake, options)))
