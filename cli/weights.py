"""baton weights PATH or --from NODE: all nodes compute with other weights of the model from now on.

Those below a path are looked through while requests go on; all nodes are paused only while the
present ones are written over. Those of a node are read by the others, in a pause of these."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from cli import client
from cli.operating import command
from cli.operating.fleet import Fleet
from common.process.standard_output import say
from protos.router_pb2 import UpdateWeightsRequest

_LONGEST_S = 1500.0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command.parser("weights", __doc__, "not all nodes have them, and says who does")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "path",
        metavar="PATH",
        nargs="?",
        default="",
        help="of a directory below every node's engine.weights_dir",
    )
    source.add_argument(
        "--from",
        dest="node",
        metavar="NODE",
        default="",
        help="address of a node, as the router knows it, whose weights all others take",
    )
    parser.add_argument(
        "--abort",
        action="store_true",
        help="end requests under way, which are else computed anew from their tokens",
    )
    client.add_router_flag(parser)
    command.add_identity_flags(parser)
    return parser.parse_args(arguments)


async def update(options: argparse.Namespace, fleet: Fleet) -> None:
    """Update the weights of all nodes. Raises Undone."""
    request = UpdateWeightsRequest(path=options.path, from_node=options.node, abort=options.abort)
    answer = await fleet.tell_router(options.router, "UpdateWeights", request, _LONGEST_S)
    aborted = f"; {answer.aborted} requests have ended" if answer.aborted else ""
    say(f"all nodes compute with {answer.id.hex()}{aborted}")


if __name__ == "__main__":
    options = parse()
    sys.exit(command.run("baton weights", options, partial(update, options)))
