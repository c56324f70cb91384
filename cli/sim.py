"""`baton sim`: runs a simulated cluster in virtual time. Needs no GPU."""

import os
import sys
from pathlib import Path

from cli import client
from common.settings import ConfigArgumentParser
from simulation.virtual.process import command, environment

PROGRAM = "baton sim"


def parser() -> ConfigArgumentParser:
    parser = ConfigArgumentParser(
        prog=PROGRAM,
        description="Run a cluster of simulated nodes in virtual time: the shipped router, nodes "
        "and hand-offs, with step times of a cost model. Prints TTFT, ITL, throughput, right "
        "responses and a hash, which is the same in each run of a file. Opens no ports.",
    )
    parser.add_argument("file", metavar="FILE", help="YAML file with cluster, load, policy, faults")
    client.add_json_flag(parser)
    return parser


def main() -> int:
    """Replace this process with the program of the simulation.

    Its clocks are replaced before the modules that read them are imported.
    """
    options = parser().parse_args()
    words = command(Path(options.file), "json" if options.json else "text", "cli.virtual")
    os.execve(words[0], words, environment())


if __name__ == "__main__":
    sys.exit(main())
