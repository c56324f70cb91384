"""Commands that a node executes by itself and a router forwards to all nodes: `baton pause`,
`continue`, `sleep` and `wake`. They differ only by their entries in ORDERS."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from cli.operating import command
from cli.operating.fleet import Fleet
from common.memory_tags import MEMORY_TAGS
from common.process.standard_output import say
from protos.router_pb2 import (
    ContinueRequest,
    ContinueResponse,
    PauseRequest,
    PauseResponse,
    ReleaseMemoryRequest,
    ResumeMemoryRequest,
)

MODES = {
    "abort": "they end",
    "retract": "they are computed anew, from their tokens",
    "in_place": "they keep what they have",
}


def _add_mode(parser: argparse.ArgumentParser) -> None:
    explained = "; ".join(f"{mode}: {what}" for mode, what in MODES.items())
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="abort",
        help=f"of requests under way: {explained} (%(default)s)",
    )


def _add_tags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only",
        dest="tags",
        action="append",
        choices=MEMORY_TAGS,
        help="this part of it (all)",
    )


def _add_none(parser: argparse.ArgumentParser) -> None:
    pass


def _paused(answer: PauseResponse) -> str:
    aborted = f"; {answer.aborted} requests have ended" if answer.aborted else ""
    return ("paused" if answer.fresh else "it was paused already") + aborted


def _continued(answer: ContinueResponse) -> str:
    return "continued" if answer.was_paused else "nothing was paused"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminCommand:
    method: str  # of the router, and of a node
    description: str
    undone: str  # when it exits with EXIT_UNDONE
    longest_s: float  # timeout for all nodes of one role, then of the other
    add_flags: Callable[[argparse.ArgumentParser], None] = _add_none
    request: Callable[[argparse.Namespace], Any]
    said: Callable[[Any], str]  # text from the response


ORDERS = {
    "pause": AdminCommand(
        method="Pause",
        description="no node computes anything, or one does not, until `baton continue`. What "
        "comes meanwhile waits there, as long as it may.",
        undone="not all of them are paused; then none is",
        longest_s=150.0,
        add_flags=_add_mode,
        request=lambda options: PauseRequest(mode=options.mode),
        said=_paused,
    ),
    "continue": AdminCommand(
        method="Continue",
        description="ends what `baton pause` has begun, on all nodes or on one.",
        undone="one of them does not answer",
        longest_s=30.0,
        request=lambda _: ContinueRequest(),
        said=_continued,
    ),
    "sleep": AdminCommand(
        method="ReleaseMemory",
        description="nodes give the memory of their KV, their weights or both back to the system, "
        "until `baton wake`. They have no requests, or are paused (`baton pause`); meanwhile all "
        "stay so.",
        undone="not all of them have; then none has",
        longest_s=1500.0,
        add_flags=_add_tags,
        request=lambda options: ReleaseMemoryRequest(tags=options.tags),
        said=lambda _: "given back",
    ),
    "wake": AdminCommand(
        method="ResumeMemory",
        description="nodes take again what they have given back by `baton sleep`. Those that had "
        "to be paused for that go on with `baton continue`, the others by themselves.",
        undone="one of them has not all of it",
        longest_s=1500.0,
        add_flags=_add_tags,
        request=lambda options: ResumeMemoryRequest(tags=options.tags),
        said=lambda _: "taken again",
    ),
}


def parse(name: str, arguments: list[str]) -> argparse.Namespace:
    order = ORDERS[name]
    parser = command.parser(name, f"baton {name}: {order.description}", order.undone)
    order.add_flags(parser)
    command.add_one_or_all(parser)
    return parser.parse_args(arguments)


async def give(order: AdminCommand, options: argparse.Namespace, fleet: Fleet) -> None:
    """Send the order to one node or to the router. Raises Undone."""
    request = order.request(options)
    say(order.said(await command.tell(options, fleet, order.method, request, order.longest_s)))


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    options = parse(name, arguments)
    sys.exit(command.run(f"baton {name}", options, partial(give, ORDERS[name], options)))
