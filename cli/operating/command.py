"""Shared parts of the operators' commands: flags, objections, results and exit codes."""

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from cli import client
from cli.client import UnfinishedRestart
from cli.operating.fleet import Fleet, Sources
from cli.program import EXIT_INTERRUPTED
from common import settings
from common.errors import ConfigError
from common.process.standard_output import say

EXIT_UNDONE = 1
LONGEST_S = 900.0
_INDENT = 2
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class Result:
    """The output of a command.

    Attributes:
        text: output without --json.
        data: output with --json: a protobuf message, or JSON values.
        code: exit code.
    """

    text: str
    data: Any
    code: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An operator's command.

    Attributes:
        details: sentences of its help after the summary.
        undone: condition under which it exits with EXIT_UNDONE, for the help.
        flags: adds its arguments and those of the router.
        work: runs it. Raises UnfinishedRestart.
    """

    details: str = ""
    undone: str = "the router does not respond"
    flags: Sequence[client.AddFlags]
    work: Callable[[argparse.Namespace, Fleet], Awaitable[Result]]

    def parser(self, name: str, summary: str) -> settings.ConfigArgumentParser:
        parser = settings.ConfigArgumentParser(
            prog=f"baton {name}",
            description=f"{summary}. {self.details}".strip(),
            epilog=f"Exits with {EXIT_UNDONE} if {self.undone}.",
        )
        for add in self.flags:
            add(parser)
        client.add_json_flag(parser)
        client.add_credential_flags(parser)
        return parser


def add_drain_flags(parser: settings.ConfigArgumentParser) -> None:
    parser.add_argument(
        "--dry-run", action="store_true", help="only list the steps and the reasons against them"
    )
    parser.add_argument("--force", action="store_true", help="continue although requests may fail")
    parser.add_argument(
        "--timeout",
        type=client.positive,
        default=LONGEST_S,
        metavar="S",
        help="seconds for each process to end, and to return (%(default)g)",
    )


def add_one_or_all(parser: settings.ConfigArgumentParser) -> None:
    """Add the address argument of commands for one node or for all nodes of a router."""
    parser.add_argument(
        "address",
        nargs="?",
        type=client.address,
        metavar="ADDRESS",
        help="HOST:PORT of one node (all nodes of the model)",
    )
    add_router_and_model(parser)


def add_router_and_model(parser: settings.ConfigArgumentParser) -> None:
    """Add the flags of commands for one model of a router."""
    client.add_router_flag(parser)
    client.add_model_flag(parser)


async def call(
    options: argparse.Namespace, fleet: Fleet, method: str, request: Any, longest_s: float
) -> Any:
    """Call `method` of the node in the options, or else of the router. Returns the response.

    Raises:
        UnfinishedRestart: the call failed.
        ConfigError: the options name both a node and a model.
    """
    if getattr(options, "address", None) is not None:
        if options.model:
            raise ConfigError("--model cannot be combined with ADDRESS: a node has one model")
        return await fleet.call_node(options.address, method, request, longest_s)
    return await fleet.call_router(options.router, method, request, longest_s)


def report(options: argparse.Namespace, sentence: str) -> None:
    """Print progress. Not on standard output with --json, which is for the result only."""
    if options.json:
        print(sentence, file=sys.stderr, flush=True)
    else:
        say(sentence)


def check_objections(
    objections: Iterable[str], options: argparse.Namespace, undone: str = "nothing is drained"
) -> list[str]:
    """Print and return the objections. Raise UnfinishedRestart if there are any without --force."""
    found = list(objections)
    for sentence in found:
        report(options, f"objection: {sentence}")
    if found and not options.force:
        raise UnfinishedRestart(f"{undone}, because requests could fail: --force overrides this")
    return found


def run(
    program: str,
    options: argparse.Namespace,
    work: Callable[[argparse.Namespace, Fleet], Awaitable[Result]],
) -> int:
    """Run `work`, print its result and return the exit code."""
    try:
        result = asyncio.run(with_fleet(options, work))
    except ConfigError as error:
        settings.wrong(program, str(error))
    except UnfinishedRestart as undone:
        print(f"{program}: {undone}", file=sys.stderr)
        return EXIT_UNDONE
    except KeyboardInterrupt:
        print(f"{program}: interrupted, operations already started continue", file=sys.stderr)
        return EXIT_INTERRUPTED
    if options.json:
        say(json_text(result.data))
    elif result.text:
        say(result.text)
    return result.code


async def with_fleet(
    options: argparse.Namespace, work: Callable[[argparse.Namespace, Fleet], Awaitable[_R]]
) -> _R:
    """Run `work` with a Fleet. Raises ConfigError."""
    metadata, source = client.operator_credentials(options)
    sources = Sources(to_routers=source, to_nodes=client.secret_source(options))
    fleet = Fleet(metadata, client.certificates(options), client.identity(options), sources)
    return await work(options, fleet)


def json_text(data: Any, indent: int | None = _INDENT) -> str:
    """Return a protobuf message or JSON values as text."""
    if isinstance(data, Message):
        data = MessageToDict(
            data, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
    return json.dumps(data, indent=indent)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return aligned columns. The last column is not padded."""
    lines = [[safe(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def size(num_bytes: int) -> str:
    """Format a size in MiB, or in GiB from a quarter of a GiB on."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.1f} MiB"


def safe(text: str) -> str:
    """Return `text`, which may come from other processes, without control characters."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
