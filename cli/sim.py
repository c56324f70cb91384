"""`baton sim`: runs a simulated cluster in virtual time. Needs no GPU."""

import os
import sys

from cli import client
from common.settings import ConfigArgumentParser
from simulation.virtual.process import command, environment

PROGRAM = "baton sim"
_MOST_SEEDS = 1 << 31


def parser() -> ConfigArgumentParser:
    parser = ConfigArgumentParser(
        prog=PROGRAM,
        description="Run a cluster of simulated nodes in virtual time: the shipped router, nodes "
        "and hand-offs, with step times of a cost model. Prints TTFT, ITL, throughput, right "
        "responses, broken rules and a hash, which is the same in each run of a file. Opens no "
        "ports.",
    )
    parser.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="YAML file with cluster, load, policy, faults, operations, planner",
    )
    parser.add_argument(
        "--chaos",
        type=client.ranged(int, 0, _MOST_SEEDS - 1),
        metavar="SEED",
        help="seed that draws cluster, load, faults and operations, in place of FILE. If a run "
        "breaks a rule, a file with as little of them as possible is printed, which repeats it",
    )
    parser.add_argument(
        "--seeds",
        type=client.ranged(int, 1, _MOST_SEEDS - 1),
        metavar="N",
        help="number of seeds, from SEED on (1)",
    )
    client.add_json_flag(parser)
    return parser


def main() -> int:
    """Replace this process with the simulation.

    The simulation replaces the clocks before it imports the modules that read them.
    """
    given = parser()
    options = given.parse_args()
    if (options.file is None) == (options.chaos is None):
        given.error("expected FILE or --chaos SEED")
    if options.seeds is not None and options.chaos is None:
        given.error("--seeds needs --chaos")
    what = [options.file]
    if options.chaos is not None:
        what = ["--chaos", str(options.chaos), str(options.seeds or 1)]
    words = command(*what, form="json" if options.json else "text", program="cli.virtual")
    os.execve(words[0], words, environment())


if __name__ == "__main__":
    sys.exit(main())
