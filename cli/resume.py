"""baton continue: ends what `baton pause` has begun, on all nodes or on one."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from cli.operating import command
from cli.operating.fleet import Fleet
from common.process.standard_output import say
from protos.router_pb2 import ContinueRequest

_LONGEST_S = 30.0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command.parser("continue", __doc__, "one of them does not answer")
    command.add_one_or_all(parser)
    return parser.parse_args(arguments)


async def resume(options: argparse.Namespace, fleet: Fleet) -> None:
    """Raises Undone."""
    answer = await command.tell(options, fleet, "Continue", ContinueRequest(), _LONGEST_S)
    say("continued" if answer.was_paused else "nothing was paused")


if __name__ == "__main__":
    options = parse()
    sys.exit(command.run("baton continue", options, partial(resume, options)))
