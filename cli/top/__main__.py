"""`baton top`: the nodes of a cluster in a terminal, until q or Ctrl-C.

If standard output is not a terminal, each frame is printed as plain lines.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from cli import client
from cli.client import UnfinishedRestart
from cli.operating.command import json_text, safe, with_fleet
from cli.operating.fleet import Fleet
from cli.top import frame as top_frame
from cli.top.frame import Rates
from common import settings
from common.errors import ConfigError
from common.process.standard_output import say
from common.process.waiting import first_of
from protos.router_pb2 import GetClusterResponse

EXIT_NO_ANSWER = 1
PROGRAM = "baton top"


def parser() -> settings.ConfigArgumentParser:
    parser = settings.ConfigArgumentParser(
        prog=PROGRAM,
        description="Watch a cluster in a terminal: nodes, pages, queues, links and rates. q or "
        "Ctrl-C ends it. Without a terminal, each frame is printed as plain lines.",
        epilog=f"Exits with {EXIT_NO_ANSWER} if --once gets no response.",
    )
    client.add_router_flag(parser)
    parser.add_argument(
        "--interval",
        type=client.ranged(float, 0.1, 3600),
        default=1.0,
        metavar="S",
        help="seconds between frames (1)",
    )
    parser.add_argument(
        "--once", action="store_true", help="print one frame, with the rates of one interval"
    )
    client.add_json_flag(parser)
    client.add_credential_flags(parser)
    return parser


class TopView:
    """Latest state of one cluster. For one event loop."""

    def __init__(self, address: str, fleet: Fleet) -> None:
        self._address = address
        self._fleet = fleet
        self._rates = Rates()
        self.cluster: GetClusterResponse | None = None
        self.problem = ""  # why the last call failed, or ""

    async def look(self) -> None:
        """Query the router once."""
        try:
            self.cluster = await self._fleet.look(self._address)
        except UnfinishedRestart as failure:
            self.problem = str(failure)
        else:
            self.problem = ""
            self._rates.take(self.cluster.nodes)

    def frame(self, width: int, height: int | None) -> RenderableType:
        parts: list[RenderableType] = []
        if self.problem:
            parts.append(Text(safe(f"Retrying. {self.problem}"), "bold red"))
        if self.cluster is not None:
            left = None if height is None else height - len(parts)
            parts.append(
                top_frame.frame(self._address, self.cluster, self._rates, width=width, height=left)
            )
        return Group(*parts)


async def watch(top: TopView, interval_s: float, console: Console, stop: asyncio.Event) -> None:
    """Show a frame at every interval, and when the terminal's size changes, until `stop` is set."""
    with _screen(console, stop) as show:
        resized = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGWINCH, resized.set)

        async def look_again_and_again() -> None:
            while True:
                await top.look()
                resized.set()
                await asyncio.sleep(interval_s)

        async def redraw() -> None:
            while True:
                await resized.wait()
                resized.clear()
                height = console.height if console.is_terminal else None
                show(top.frame(console.width, height))

        for ended in await first_of(look_again_and_again(), redraw(), stop.wait()):
            if ended is not None:
                ended.result()


async def once(top: TopView, interval_s: float, console: Console) -> int:
    """Print one frame. Returns the exit code."""
    await top.look()
    if not top.problem:
        await asyncio.sleep(interval_s)  # a rate needs two samples
        await top.look()
    if top.problem:
        print(f"{PROGRAM}: {top.problem}", file=sys.stderr)
        return EXIT_NO_ANSWER
    console.print(top.frame(console.width, None))
    return 0


async def print_json(top: TopView, interval_s: float, *, once: bool) -> int:
    """Print the cluster as one line of JSON at every interval. Returns the exit code."""
    while True:
        await top.look()
        if top.problem:
            print(f"{PROGRAM}: {top.problem}", file=sys.stderr)
            if once:
                return EXIT_NO_ANSWER
        elif top.cluster is not None:
            say(json_text(top.cluster, indent=None))
            if once:
                return 0
        await asyncio.sleep(interval_s)


@contextlib.contextmanager
def _screen(console: Console, stop: asyncio.Event) -> Iterator[Any]:
    """Yield a function that shows a frame: in place on a terminal, otherwise below the last one."""
    if not console.is_terminal:

        def follow(frame: RenderableType) -> None:
            console.print(frame)
            console.print()

        yield follow
        return
    with Live(console=console, screen=True, auto_refresh=False) as live, _keys(stop):
        yield lambda frame: live.update(frame, refresh=True)


@contextlib.contextmanager
def _keys(stop: asyncio.Event) -> Iterator[None]:
    """Set `stop` when q is pressed.

    Keys are read unbuffered without echo. Restores the terminal.
    """
    if not sys.stdin.isatty():
        yield
        return
    loop, keyboard = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def pressed() -> None:
        if os.read(keyboard, 64).lower() in (b"", b"q"):
            stop.set()

    tty.setcbreak(keyboard)
    loop.add_reader(keyboard, pressed)
    try:
        yield
    finally:
        loop.remove_reader(keyboard)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


async def _main(options: argparse.Namespace, fleet: Fleet) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    console = Console(highlight=False)
    top = TopView(options.router, fleet)
    if not (options.json or options.once):
        await watch(top, options.interval, console, stop)
        return 0
    if options.json:
        printing = print_json(top, options.interval, once=options.once)
    else:
        printing = once(top, options.interval, console)
    printed, _ = await first_of(printing, stop.wait())
    return 0 if printed is None else int(printed.result())


if __name__ == "__main__":
    options = parser().parse_args()
    try:
        sys.exit(asyncio.run(with_fleet(options, _main)))
    except ConfigError as error:
        settings.wrong(PROGRAM, str(error))
