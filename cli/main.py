"""The `baton` command: replaces itself by the program that the first word names. It imports none of
them, and starts none if another package has overwritten one of their names."""

import os
import sys
from importlib.util import find_spec
from typing import NamedTuple

from cli import own_names

EXIT_USAGE = 2


class CliCommand(NamedTuple):
    module: str
    summary: str
    needs: tuple[str, ...] = ()  # packages that an installation for routers lacks
    first: tuple[str, ...] = ()  # arguments before the given ones


def _order(name: str, summary: str) -> CliCommand:
    return CliCommand("cli.orders", summary, first=(name,))


_A_NODES = ("torch", "triton", "transformers", "safetensors", "numpy")

COMMANDS = {
    "up": CliCommand("cli.up", "start a router and nodes on this machine, and serve", _A_NODES),
    "generate": CliCommand("cli.generate", "send a prompt to a router, stream the answer"),
    "bench": CliCommand(
        "bench", "measure: load, colocated or disaggregated, break-even", ("httptools", "numpy")
    ),
    "top": CliCommand("cli.top", "watch a cluster: nodes, pages, queues, links, rates"),
    "explain": CliCommand("cli.explain", "what happened to one request, on every program"),
    "pause": _order("pause", "have nodes compute nothing for a while"),
    "continue": _order("continue", "end what `baton pause` has begun"),
    "weights": CliCommand("cli.weights", "have all nodes compute with other weights of the model"),
    "sleep": _order("sleep", "have nodes give memory back to the system for a while"),
    "wake": _order("wake", "have them take it again"),
    "profile": CliCommand("cli.profile", "have torch's profiler watch some steps of nodes"),
    "drain": CliCommand("cli.drain", "end a program, once its requests have ended or moved"),
    "switch": CliCommand(
        "cli.switch", "have a node take the other role, with its weights and cache"
    ),
    "move": CliCommand("cli.move", "have a running request go on at another decode node"),
    "planner": CliCommand(
        "cli.planner", "which nodes should take another role, be added or removed"
    ),
    "roll": CliCommand("cli.roll", "restart all programs, one after the other, unnoticed"),
    "keys": CliCommand("cli.keys", "make an API key, and its entry for --api-keys"),
    "secret": CliCommand("cli.secret", "print a new cluster secret, or what is made of one"),
    "check": CliCommand(
        "cli.check", "will this configuration and model run on this machine?", _A_NODES
    ),
    "demo-model": CliCommand("cli.demo_model", "write the tiny model that `baton up` serves"),
    "router": CliCommand("router", "run a router"),
    "prefill": CliCommand("prefill_node", "run a prefill node", _A_NODES),
    "decode": CliCommand("decode_node", "run a decode node", _A_NODES),
}


def usage() -> str:
    lines = [f"  {name:<11} {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: baton COMMAND [ARGUMENT]...",
            "",
            *lines,
            "",
            "baton COMMAND --help tells more, baton --version which version this is.",
        ]
    )


def _say(text: str) -> None:
    from common.process.standard_output import (
        say,  # imported late: `common` may be another distribution's package
    )

    say(text)


def main() -> int:
    match sys.argv[1:]:
        case [name, *arguments] if name in COMMANDS:
            if wrong := own_names.clash():
                print(f"baton: {wrong}", file=sys.stderr)
                return EXIT_USAGE
            if lacking := [each for each in COMMANDS[name].needs if find_spec(each) is None]:
                print(
                    f"baton {name}: this installation, for routers, lacks {', '.join(lacking)}; "
                    "`pip install .` in Baton's directory, without --no-deps, adds what is missing",
                    file=sys.stderr,
                )
                return EXIT_USAGE
            # -P: do not import a directory of the user that is called router
            command = COMMANDS[name]
            program = ["-m", "cli.program", name, command.module, *command.first, *arguments]
            os.execv(sys.executable, [sys.executable, "-P", *program])
        case ["-h" | "--help" | "help"]:
            _say(usage())
            return 0
        case ["--version"]:
            from common.version import VERSION

            _say(f"baton {VERSION}")
            return 0
        case []:
            print(usage(), file=sys.stderr)
        case [unknown, *_]:
            print(f"baton: no command {unknown!r} (one of {', '.join(COMMANDS)})", file=sys.stderr)
    return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
