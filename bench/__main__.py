"""baton bench: load on a server, disaggregated against colocated, and from where that pays."""

import argparse
import gc
import sys
from collections.abc import Sequence

import uvloop

from bench.commands import break_even, compare, load
from bench.commands.command import BenchCommand, run
from bench.errors import InvalidInput
from common import settings
from common.config import DecodeConfig, PrefillConfig

PROGRAM = "baton bench"
COMMANDS = {
    "load": (load, "measure latency and throughput of a running server"),
    "compare": (compare, "compare colocated and disaggregated nodes, started here"),
    "break-even": (break_even, "find the prompt length from which disaggregation pays"),
}


def parser() -> settings.ConfigArgumentParser:
    return _parsers()[0]


def _parsers() -> tuple[settings.ConfigArgumentParser, dict[str, settings.ConfigArgumentParser]]:
    """Return the parser, and those of its commands by name."""
    parser = settings.ConfigArgumentParser(
        prog=PROGRAM,
        description="Measure, and write a report, which is one HTML file. The last line of "
        "standard output is JSON. Progress is printed to standard error.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers = {}
    for name, (module, summary) in COMMANDS.items():
        parsers[name] = commands.add_parser(name, help=summary, description=module.__doc__)
        module.add_flags(parsers[name])
    return parser, parsers


def parse(arguments: Sequence[str]) -> tuple[BenchCommand, argparse.Namespace]:
    """Parse the command line. Exits if a flag is wrong."""
    parser, parsers = _parsers()
    options, rest = parser.parse_known_args(arguments)
    options.node_flags = rest
    records = () if options.command == "load" else (PrefillConfig, DecodeConfig)
    parsers[options.command].reject_unknown_flags(rest, *records)
    try:
        match options.command:
            case "compare":
                return compare.CompareCommand(options, rest), options
            case "break-even":
                return break_even.BreakEvenCommand(options, rest), options
            case _:
                return load.LoadCommand(options), options
    except InvalidInput as error:
        settings.wrong(f"{PROGRAM} {options.command}", str(error))


def main() -> int:
    command, options = parse(sys.argv[1:])
    gc.freeze()  # avoids pauses of the client during measurements
    return uvloop.run(run(command, options))


if __name__ == "__main__":
    sys.exit(main())
