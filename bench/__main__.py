"""baton bench: load on a server, disaggregated against colocated, and times of engine steps."""

import argparse
import gc
import sys
from collections.abc import Callable, Mapping, Sequence

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
_REPORTING: Mapping[str, Callable[[argparse.Namespace], BenchCommand]] = {
    "load": load.LoadCommand,
    "compare": compare.CompareCommand,
    "break-even": break_even.BreakEvenCommand,
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


def parse(arguments: Sequence[str]) -> tuple[BenchCommand | None, argparse.Namespace]:
    """Parse the command line. Exits if an option is invalid.

    Returns:
        The command, or None for `steps`, which has no report, and the options.
    """
    parser, parsers = _parsers()
    options, options.node_flags = parser.parse_known_args(arguments)
    nodes = _NODES.get(options.command, ())
    parsers[options.command].reject_unknown_flags(options.node_flags, *nodes)
    if options.command == "steps":
        return None, options
    try:
        return _REPORTING[options.command](options), options
    except InvalidInput as error:
        settings.wrong(f"{PROGRAM} {options.command}", str(error))


def main() -> int:
    command, options = parse(sys.argv[1:])
    if command is None:
        return steps.run(options)
    gc.freeze()  # avoids garbage collection pauses of the client during measurements
    return uvloop.run(run(command, options))


if __name__ == "__main__":
    sys.exit(main())
