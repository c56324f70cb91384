"""baton bench: load on a server, disaggregated against colocated, and times of engine steps."""

import argparse
import gc
import sys
from collections.abc import Mapping, Sequence
from typing import cast

import uvloop

from bench.commands import break_even, compare, load, steps
from bench.commands.command import BenchCommand, run
from bench.errors import InvalidInput
from common import settings
from common.config import DecodeConfig, NodeConfig, PrefillConfig

PROGRAM = "baton bench"
COMMANDS = {
    "load": (load, "measure latency and throughput of a running server"),
    "compare": (compare, "compare colocated and disaggregated nodes, started here"),
    "steps": (steps, "time single engine steps, for `baton plan` and simulated nodes"),
    "break-even": (break_even, "find the prompt length from which disaggregation pays"),
}

# Nodes whose flags a command accepts.
_NODES: Mapping[str, Sequence[type[NodeConfig]]] = {
    "compare": (PrefillConfig, DecodeConfig),
    "break-even": (PrefillConfig, DecodeConfig),
    "steps": (DecodeConfig,),
}


def parser() -> settings.ConfigArgumentParser:
    return _parsers()[0]


def _parsers() -> tuple[settings.ConfigArgumentParser, dict[str, settings.ConfigArgumentParser]]:
    """Return the parser, and the parsers of its commands by name."""
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
    """Parse the command line of a command with a report. Exits if a flag is invalid."""
    options = _options(arguments)
    return _command(options), options


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of any command. Exits if a flag is invalid."""
    parser, parsers = _parsers()
    options, rest = parser.parse_known_args(arguments)
    options.node_flags = rest
    records = _NODES.get(options.command, ())
    parsers[options.command].reject_unknown_flags(rest, *records)
    return cast(argparse.Namespace, options)


def _command(options: argparse.Namespace) -> BenchCommand:
    rest = options.node_flags
    try:
        match options.command:
            case "compare":
                return compare.CompareCommand(options, rest)
            case "break-even":
                return break_even.BreakEvenCommand(options, rest)
            case _:
                return load.LoadCommand(options)
    except InvalidInput as error:
        settings.wrong(f"{PROGRAM} {options.command}", str(error))


def main() -> int:
    options = _options(sys.argv[1:])
    if options.command == "steps":
        return steps.run(options, options.node_flags)
    command = _command(options)
    gc.freeze()  # avoids garbage collection pauses of the client during measurements
    return uvloop.run(run(command, options))


if __name__ == "__main__":
    sys.exit(main())
