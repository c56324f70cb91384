"""baton pause: no node computes anything, or one does not, until `baton continue`. What comes
meanwhile waits there, as long as it may."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from cli.operating import command
from cli.operating.fleet import Fleet
from common.process.standard_output import say
from protos.router_pb2 import PauseRequest

MODES = {
    "abort": "they end",
    "retract": "they are computed anew, from their tokens",
    "in_place": "they keep what they have",
}
_LONGEST_S = 150.0  # of all nodes of one role, then of the other


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command.parser("pause", __doc__, "not all of them are paused; then none is")
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="abort",
        help="of requests under way: "
        + "; ".join(f"{mode}: {what}" for mode, what in MODES.items())
        + " (%(default)s)",
    )
    command.add_one_or_all(parser)
    return parser.parse_args(arguments)


async def pause(options: argparse.Namespace, fleet: Fleet) -> None:
    """Raises Undone."""
    request = PauseRequest(mode=options.mode)
    answer = await command.tell(options, fleet, "Pause", request, _LONGEST_S)
    aborted = f"; {answer.aborted} requests have ended" if answer.aborted else ""
    say(("paused" if answer.fresh else "it was paused already") + aborted)


if __name__ == "__main__":
    options = parse()
    sys.exit(command.run("baton pause", options, partial(pause, options)))
