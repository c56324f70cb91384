"""`baton check`: checks that a configuration and a model run on this machine. Starts nothing.

Exit code 0: they run. 1: they do not, and the table has the reasons. 2: the configuration is
invalid.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict

from cli import client
from common.config import DecodeConfig, NodeConfig, PrefillConfig, RouterConfig
from common.process.standard_output import say
from common.settings import ConfigArgumentParser, parser_of, read

PROGRAM = "baton check"
_RECORDS: Mapping[str, type[RouterConfig] | type[NodeConfig]] = {
    "router": RouterConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
}
_HELP = ("-h", "--help", "--help-all")


def _add_flags(parser: ConfigArgumentParser) -> None:
    parser.add_argument(
        "--role", choices=tuple(_RECORDS), default="decode", help="process to check (%(default)s)"
    )
    client.add_json_flag(parser)


def parser(role: str = "decode") -> ConfigArgumentParser:
    """Return the parser of all flags, with those of a process of this role."""
    every = parser_of(_RECORDS[role], PROGRAM)
    every.common |= {"--role", "--json"}
    every.description = (
        "Check that a process with these flags and this model runs on this machine. Starts "
        "nothing. Exits with 1 if it does not run."
    )
    _add_flags(every)
    return every


def main() -> int:
    own = ConfigArgumentParser(prog=PROGRAM, add_help=False)
    _add_flags(own)
    options, flags = own.parse_known_args()
    if any(flag in _HELP for flag in flags):
        parser(options.role).parse_args(flags)
    config = read(_RECORDS[options.role], PROGRAM, flags)

    from cli.check import findings  # imported late: torch takes seconds

    found = list(findings.of(config))
    if options.json:
        say(json.dumps([asdict(finding) for finding in found], indent=2))
    else:
        findings.print_table(options.role, found)
    return int(any(finding.verdict == "fails" for finding in found))


if __name__ == "__main__":
    sys.exit(main())
