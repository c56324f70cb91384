"""`baton completion`: prints a shell's completion script, generated from all commands' parsers."""

import argparse
import sys
from importlib import import_module
from importlib.util import find_spec

import shtab

from cli.main import COMMANDS, CliCommand, CliGroup, missing
from common import config
from common.process.standard_output import say
from common.settings import ConfigArgumentParser, parser_of

_SHELLS = ("bash", "zsh", "fish")
_FILES = ("FILE", "DIR", "Path")


def parser() -> ConfigArgumentParser:
    parser = ConfigArgumentParser(
        prog="baton completion",
        description="Print the completion script of a shell. For bash, for example: "
        "source <(baton completion bash)",
    )
    parser.add_argument("shell", choices=_SHELLS, help="bash, zsh or fish")
    return parser


def command_parser(name: str, command: CliCommand) -> argparse.ArgumentParser:
    if command.record:
        return parser_of(getattr(config, command.record), f"baton {name}")
    package = f"{command.module}.__main__"
    module = import_module(package if _is_package(command.module) else command.module)
    made: argparse.ArgumentParser = module.parser(*command.first)
    return made


def _is_package(module: str) -> bool:
    spec = find_spec(module)
    return spec is not None and spec.submodule_search_locations is not None


def whole_parser() -> argparse.ArgumentParser:
    """Return one parser for all commands. Those whose packages are not installed have no flags."""
    root = argparse.ArgumentParser(prog="baton", allow_abbrev=False)
    root.add_argument("--version", action="store_true", help="print the version")
    words = root.add_subparsers()
    for name, entry in COMMANDS.items():
        match entry:
            case CliCommand():
                _add(words, name, name, entry)
            case CliGroup():
                group = words.add_parser(name, help=entry.summary).add_subparsers()
                for below, command in entry.commands.items():
                    _add(group, below, f"{name} {below}", command)
    return root


def _add(
    words: "argparse._SubParsersAction[argparse.ArgumentParser]",
    word: str,
    name: str,
    command: CliCommand,
) -> None:
    parents = [] if missing(command) else [command_parser(name, command)]
    for action in (action for parent in parents for action in parent._actions):
        _describe_value(action)
    words.add_parser(word, help=command.summary, parents=parents, add_help=not parents)


def _describe_value(action: argparse.Action) -> None:
    """Add the choices or the kind of value that an action's metavar names."""
    metavar = str(action.metavar)
    if metavar.startswith("{"):
        action.choices = metavar.strip("{}").split(",")
    elif metavar in _FILES:
        action.complete = shtab.FILE  # type: ignore[attr-defined]


def main() -> int:
    shell = parser().parse_args().shell
    say(shtab.complete(whole_parser(), shell=shell))
    return 0


if __name__ == "__main__":
    sys.exit(main())
