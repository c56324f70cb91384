"""Generates the CLI reference from the argument parsers of the commands."""

import argparse
import contextlib
import runpy
import sys
import warnings
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from cli.main import COMMANDS, CliCommand

_CONFIGURED = {"router": "router", "prefill": "prefill-node", "decode": "decode-node"}
_HEAD = """# CLI reference

`baton COMMAND --help` prints the same text. `baton --version` prints the version. A wrong command
line ends with exit code 2.

| command | purpose |
|---|---|
"""


class _Parsed(BaseException):
    """Ends a command when it is about to read its command line."""


def page() -> str:
    rows = [f"| [`baton {name}`](#baton-{name}) | {c.summary} |\n" for name, c in COMMANDS.items()]
    return "".join([_HEAD, *rows, *(part for name in COMMANDS for part in _command(name))])


def _command(name: str) -> Iterator[str]:
    command = COMMANDS[name]
    yield f"\n## baton {name}\n\n"
    if name in _CONFIGURED:
        yield f"Options: [configuration reference](configuration.md#{_CONFIGURED[name]}).\n"
        return
    parser = _parser(command)
    parts = _subcommands(parser)
    if command.first:
        yield from _options(parts[command.first[0]] if parts else parser)
        return
    yield from _options(parser)
    yield f"\n{parser.epilog or ''}\n"
    for part, below in parts.items():
        yield f"\n### baton {name} {part}\n\n"
        yield from _options(below)


def _parser(command: CliCommand) -> argparse.ArgumentParser:
    """Run a command up to the point at which it has built its parser."""
    built: list[argparse.ArgumentParser] = []

    def parse(parser: argparse.ArgumentParser, *_: Any) -> None:
        built.append(parser)
        raise _Parsed

    arguments = ["baton", *command.first]
    with warnings.catch_warnings(), contextlib.suppress(_Parsed):
        warnings.simplefilter("ignore")  # runpy: the module may be loaded already
        with (
            patch.object(argparse.ArgumentParser, "parse_known_args", parse),
            patch.object(sys, "argv", arguments),
        ):
            runpy.run_module(command.module, run_name="__main__")
    return built[0]


def _subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    shown = [
        action
        for action in parser._actions
        if action.help != argparse.SUPPRESS
        and not isinstance(action, (argparse._SubParsersAction, argparse._HelpAction))
    ]
    if not shown:
        return
    formatter = parser._get_formatter()
    yield "| argument | choices | default | description |\n|---|---|---|---|\n"
    for action in shown:
        name = ", ".join(f"`{flag}`" for flag in action.option_strings) or f"`{_value(action)}`"
        if action.option_strings and action.nargs != 0 and (value := _value(action)):
            name += f" {value}"
        choices = _choices(action)
        about = formatter._expand_help(action) if action.help else ""
        has_default = isinstance(action.default, (str, int, float)) and action.default not in (
            "",
            False,
            argparse.SUPPRESS,
        )
        yield _row(name, choices, f"`{action.default}`" if has_default else "", about)


def _choices(action: argparse.Action) -> str:
    if isinstance(action.choices, range):
        return f"{action.choices[0]} to {action.choices[-1]}"
    return ", ".join(f"`{choice}`" for choice in action.choices or ())


def _value(action: argparse.Action) -> str:
    metavar = action.metavar or ("" if action.choices else action.dest.upper())
    return " ".join(metavar) if isinstance(metavar, tuple) else metavar


def _row(*cells: str) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |\n"
