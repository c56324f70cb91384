"""Shared parts of commands that operate processes: flags, objections, exit codes."""

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from cli import client
from cli.operating.fleet import Fleet, Sources, UnfinishedRestart
from cli.program import EXIT_INTERRUPTED
from common import settings
from common.errors import ConfigError
from common.identity.secret import operator_keys
from common.process.standard_output import say

EXIT_UNDONE = 1
LONGEST_S = 900.0


def parser(name: str, description: str | None, undone: str) -> argparse.ArgumentParser:
    """Return the argument parser of `baton NAME`.

    Args:
        undone: condition under which the command exits with EXIT_UNDONE.
    """
    epilog = f"Exits with {EXIT_UNDONE} if {undone}."
    return settings.ConfigArgumentParser(
        prog=f"baton {name}", description=description, epilog=epilog
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be done, and what speaks against it"
    )
    parser.add_argument("--force", action="store_true", help="whatever speaks against it")
    parser.add_argument(
        "--timeout",
        type=positive,
        default=LONGEST_S,
        metavar="S",
        help="for each program to end, and to be back (%(default)g)",
    )
    add_identity_flags(parser)


def add_one_or_all(parser: argparse.ArgumentParser) -> None:
    """Add the address argument of commands for one node or for all nodes of a router."""
    parser.add_argument(
        "address",
        nargs="?",
        type=client.address,
        metavar="ADDRESS",
        help="HOST:PORT of one node (all that the router knows)",
    )
    client.add_router_flag(parser)
    add_identity_flags(parser)


def add_identity_flags(parser: argparse.ArgumentParser) -> None:
    """Add the credential and TLS flags that all commands share."""
    client.add_secret_flag(parser)
    client.add_key_flag(parser)
    client.add_tls_flags(parser)


async def tell(
    options: argparse.Namespace, fleet: Fleet, method: str, request: Any, longest_s: float
) -> Any:
    """Call `method` of the given node, or of the router, and return the response. Raises
    UnfinishedRestart."""
    if options.address is not None:
        return await fleet.tell_node(options.address, method, request, longest_s)
    return await fleet.tell_router(options.router, method, request, longest_s)


def heed(
    objections: Iterable[str], options: argparse.Namespace, undone: str = "nothing is drained"
) -> None:
    """Print the objections. Raises UnfinishedRestart if there are any, unless --force is given."""
    found = list(objections)
    for sentence in found:
        say(f"but: {sentence}")
    if found and not options.force:
        raise UnfinishedRestart(f"{undone}; --force does it all the same")


def run(program: str, options: argparse.Namespace, work: Callable[[Fleet], Awaitable[None]]) -> int:
    """Run `work` and return the exit code."""
    try:
        asyncio.run(with_fleet(options, work))
    except ConfigError as error:
        settings.wrong(program, str(error))
    except UnfinishedRestart as undone:
        print(f"{program}: {undone}", file=sys.stderr)
        return EXIT_UNDONE
    except KeyboardInterrupt:
        print(f"{program}: interrupted; what has been asked for goes on", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


async def with_fleet(options: argparse.Namespace, work: Callable[[Fleet], Awaitable[None]]) -> None:
    """Run `work` with a Fleet.

    Routers receive the given API key, or else the operators' key of the secret. Raises ConfigError.
    """
    identity = client.identity(options)
    metadata, source = client.credentials(options), client.key_source(options)
    secret_source = client.secret_source(options)
    if not metadata and identity is not None:
        key = operator_keys(identity.keyrings.current())[0]
        metadata, source = (("authorization", f"Bearer {key}"),), secret_source
    sources = Sources(to_routers=source, to_nodes=secret_source)
    await work(Fleet(metadata, client.certificates(options), identity, sources))


def positive(text: str) -> float:
    """Parse a positive number, for argparse."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, got {text!r}")
    return number
