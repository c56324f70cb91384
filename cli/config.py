"""`baton config show` and `baton config validate`: a process's settings, without starting it."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cli import client
from common import settings
from common.config import (
    DecodeConfig,
    EncodeConfig,
    NodeConfig,
    PrefillConfig,
    RouterConfig,
)
from common.process.standard_output import say

RECORDS: Mapping[str, type[RouterConfig] | type[NodeConfig]] = {
    "router": RouterConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "encode": EncodeConfig,
}


def parser(action: str) -> settings.ConfigArgumentParser:
    shows = action == "show"
    parser = settings.ConfigArgumentParser(
        prog=f"baton config {action}",
        description="Show all settings of a process with their sources: a flag, an environment "
        "variable, the file of --config, or the default."
        if shows
        else "Validate a YAML file of settings. The error names the wrong entry.",
        epilog="Other flags are those of the process, such as --config FILE. `baton serve router "
        "--help-all` lists those of a router. Exits with 2 if a setting is invalid.",
    )
    parser.add_argument(
        "process", choices=tuple(RECORDS), metavar="PROCESS", help=", ".join(RECORDS)
    )
    if not shows:
        parser.add_argument("file", type=Path, metavar="FILE", help="file for --config")
    client.add_json_flag(parser)
    return parser


def main(action: str, *arguments: str) -> int:
    reads = parser(action)
    options, flags = reads.parse_known_args(arguments)
    record = RECORDS[options.process]
    reads.reject_unknown_flags([flag for flag in flags if flag.startswith("--")], record)
    if action == "validate":
        flags = [f"--config={options.file}", *flags]
    config, sources = settings.resolve(record, reads.prog, flags)
    if action == "validate":
        say(
            json.dumps({"file": str(options.file), "valid": True})
            if options.json
            else f"{options.file} is valid for `baton serve {options.process}`"
        )
        return 0
    shown = {
        ".".join(where): (value, sources.of(where))
        for where, value in _values(config.model_dump(mode="json"))
    }
    say(_json(shown) if options.json else _text(shown))
    return 0


def _values(record: Mapping[str, Any], *where: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each setting with its path."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _values(value, *where, name)
        else:
            yield (*where, name), value


def _json(shown: Mapping[str, tuple[Any, str]]) -> str:
    content = {name: {"value": value, "source": source} for name, (value, source) in shown.items()}
    return json.dumps(content, indent=2)


def _text(shown: Mapping[str, tuple[Any, str]]) -> str:
    lines = [(f"{name}: {json.dumps(value)}", source) for name, (value, source) in shown.items()]
    width = max((len(line) for line, source in lines if source != "default"), default=0)
    return "\n".join(f"{line:<{width}}  # {source}" for line, source in lines)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
