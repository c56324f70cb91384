"""Generates the CLI reference from the argument parsers of the commands."""

import argparse
from collections.abc import Iterator

from cli.completion import command_parser
from cli.main import COMMANDS, RENAMED, CliCommand, CliGroup, commands

_CONFIGURED = {
    "RouterConfig": "router",
    "PrefillConfig": "prefill-node",
    "DecodeConfig": "decode-node",
    "EncodeConfig": "encode-node",
    "RankHostConfig": "rank-host",
}
_HEAD = """# CLI reference

`baton COMMAND --help` shows the common options, and `--help-all` shows all of them.
`baton --version` prints the version. A wrong command line ends with exit code 2. Commands that
print results have `--json`.

`baton completion bash`, `zsh` or `fish` prints the completion script of a shell:

```sh
baton completion bash > ~/.local/share/bash-completion/completions/baton
```

| command | purpose |
|---|---|
"""
_OLD = """
## Old names

The commands of version 0.1 end with exit code 2 and print the new name.

| old command | new command |
|---|---|
"""


def page() -> str:
    rows = [f"| [`baton {name}`](#{_anchor(name)}) | {c.summary} |\n" for name, c in commands()]
    parts = [part for name in COMMANDS for part in _entry(name)]
    old = [f"| `baton {name}` | `baton {new}` |\n" for name, new in RENAMED.items()]
    return "".join([_HEAD, *rows, *parts, _OLD, *old])


def _anchor(name: str) -> str:
    return f"baton-{name}".replace(" ", "-")


def _entry(name: str) -> Iterator[str]:
    match COMMANDS[name]:
        case CliCommand() as command:
            yield from _command(name, command, "##")
        case CliGroup(summary, below):
            yield f"\n## baton {name}\n\n{summary}.\n"
            for word, command in below.items():
                yield from _command(f"{name} {word}", command, "###")


def _command(name: str, command: CliCommand, level: str) -> Iterator[str]:
    yield f"\n{level} baton {name}\n\n"
    if command.record:
        anchor = _CONFIGURED[command.record]
        yield f"{command.summary}. Options: "
        yield f"[configuration reference](configuration.md#{anchor}).\n"
        return
    parser = command_parser(name, command)
    yield f"{_paragraph(parser.description)}\n\n"
    yield from _options(parser, all_settings=name == "check")
    yield f"\n{parser.epilog or ''}\n"
    for part, below in _subcommands(parser).items():
        yield f"\n{level}# baton {name} {part}\n\n"
        yield from _options(below)


def _paragraph(text: str | None) -> str:
    """Return a description as Markdown. Lines of examples are indented code."""
    lines = (text or "").split("\n")
    lines = [f"    {line}" if line.startswith("baton ") else line for line in lines]
    return "\n".join(lines).strip()


def _subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _options(parser: argparse.ArgumentParser, *, all_settings: bool = False) -> Iterator[str]:
    """Yield the table of the options.

    Args:
        all_settings: whether settings are among them, which have a reference of their own.
    """
    shown = [
        action
        for action in parser._actions
        if action.help != argparse.SUPPRESS
        and not isinstance(action, argparse._SubParsersAction)
        and not {"--help", "--help-all"}.intersection(action.option_strings)
        and not (all_settings and action.dest not in ("role", "json"))
    ]
    if all_settings:
        yield "All flags of the process are accepted, see the "
        yield "[configuration reference](configuration.md).\n\n"
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
