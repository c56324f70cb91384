"""Entry point of the operators' commands: `python -m cli.operating "nodes drain" ADDRESS ...`."""

import sys

from cli.main import commands
from cli.operating import command
from cli.operating.calls import CALLS
from cli.operating.command import Operation
from cli.operating.drains import DRAINS
from cli.operating.views import VIEWS
from common.settings import ConfigArgumentParser

OPERATIONS: dict[str, Operation] = {**VIEWS, **CALLS, **DRAINS}


def parser(name: str) -> ConfigArgumentParser:
    return OPERATIONS[name].parser(name, dict(commands())[name].summary)


def main(name: str, *arguments: str) -> int:
    options = parser(name).parse_args(arguments)
    return command.run(f"baton {name}", options, OPERATIONS[name].work)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
