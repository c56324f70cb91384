"""baton bench: load on a server, disaggregated against colocated, and from where that pays."""

import argparse
import gc
import sys
from collections.abc import Sequence

import uvloop

from bench.commands import break_even as break_even_command
from bench.commands import compare as compare_command
from bench.commands import load as load_command
from bench.commands.command import BenchCommand, run
from bench.errors import InvalidInput
from common import settings
from common.config import DecodeConfig, PrefillConfig

PROGRAM = "baton bench"


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
    for name, module, summary in (
        ("load", load_command, "measure latency and throughput of a running server"),
        (
            "compare",
            compare_command,
            "compare colocated and disaggregated nodes, started here",
        ),
        ("break-even", break_even_command, "find the prompt length from which disaggregation pays"),
    ):
        parsers[name] = commands.add_parser(name, help=summary, description=module.__doc__)
        module.add_flags(parsers[name])
    return parser, parsers


def parse(arguments: Sequence[str]) -> tuple[BenchCommand, argparse.Namespace]:
    """Parse the command line. Exits if a flag is wrong."""
    parser, parsers = _parsers()
    options, rest = parser.parse_known_args(arguments)
    options.node_flags = rest
    starts_nodes = options.command != "load"
    records = (PrefillConfig, DecodeConfig) if starts_nodes else ()
    parsers[options.command].refuse_strangers(rest, *records)
    prog = f"{PROGRAM} {options.command}"
    try:
        command: BenchCommand
        match options.command:
            case "compare":
                command = compare_command.CompareCommand(options, rest)
            case "break-even":
                command = break_even_command.BreakEvenCommand(options, rest)
            case _:
                command = load_command.LoadCommand(options)
    except InvalidInput as error:
        settings.wrong(prog, str(error))
    return command, options


def main() -> int:
    command, options = parse(sys.argv[1:])
    gc.freeze()  # avoids pauses of the client during measurements
    return uvloop.run(run(command, options))


if __name__ == "__main__":
    sys.exit(main())
