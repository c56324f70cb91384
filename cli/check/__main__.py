"""`baton check`: checks that a configuration and a model run on this machine. Starts nothing.

With two files, the settings of a prefill node and of a decode node, it also checks whether they can
pair.

Exit code 0: they run. 1: they do not, and the table has the reasons. 2: the configuration is
invalid.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import takewhile

from cli import client
from cli.config import RECORDS
from common.config import DecodeConfig, NodeConfig, PrefillConfig
from common.process.standard_output import say
from common.settings import ConfigArgumentParser, parser_of, read, wrong

PROGRAM = "baton check"
_HELP = ("-h", "--help", "--help-all")


def _add_flags(parser: ConfigArgumentParser) -> None:
    parser.add_argument(
        "--role", choices=tuple(RECORDS), default="decode", help="process to check (%(default)s)"
    )
    client.add_json_flag(parser)


def parser(role: str = "decode") -> ConfigArgumentParser:
    """Return the parser of all flags, with those of a process of this role."""
    every = parser_of(RECORDS[role], PROGRAM)
    every.common |= {"--role", "--json"}
    every.usage = "%(prog)s [PREFILL.yaml DECODE.yaml] [--config FILE] [--FLAG VALUE]..."
    every.description = (
        "Check that a process with these flags and this model runs on this machine. Starts "
        "nothing. Exits with 1 if it does not run. With two files of settings, check a prefill "
        "node and a decode node, and whether they can pair. Then it lists the bytes of a page that "
        "each rank of the decode node reads. The flags apply to both nodes."
    )
    _add_flags(every)
    return every


def main() -> int:
    own = ConfigArgumentParser(prog=PROGRAM, add_help=False)
    _add_flags(own)
    words = sys.argv[1:]
    files = list(takewhile(lambda word: not word.startswith("-"), words))
    options, flags = own.parse_known_args(words[len(files) :])
    if any(flag in _HELP for flag in flags):
        parser(options.role).parse_args(flags)
    if files:
        return _check_pair(files, flags, as_json=options.json)
    config = read(RECORDS[options.role], PROGRAM, flags)

    from cli.check import findings  # imported late: torch takes seconds

    found = list(findings.of(config))
    if options.json:
        say(json.dumps([asdict(finding) for finding in found], indent=2))
    else:
        findings.print_table(_title(options.role), found)
    return int(findings.fail(found))


def _title(role: str) -> str:
    return role if role == "router" else f"{role} node"


def _check_pair(files: Sequence[str], flags: Sequence[str], *, as_json: bool) -> int:
    if len(files) != 2:
        wrong(PROGRAM, f"expected two files, of a prefill and a decode node, got {len(files)}")
    if any(flag.partition("=")[0] == "--config" for flag in flags):
        wrong(PROGRAM, "--config cannot be combined with two files")
    prefill = read(PrefillConfig, PROGRAM, [*flags, f"--config={files[0]}"])
    decode = read(DecodeConfig, PROGRAM, [*flags, f"--config={files[1]}"])

    from cli.check import findings  # imported late: torch takes seconds
    from cli.check.pairing import Pair

    configs: Mapping[str, NodeConfig] = {"prefill": prefill, "decode": decode}
    nodes = {role: list(findings.of(node)) for role, node in configs.items()}
    names = [f"{role} node" for role in nodes]
    pair = Pair.of(prefill, decode, names)
    if as_json:
        plain = {role: [asdict(each) for each in found] for role, found in nodes.items()}
        say(json.dumps({**plain, "pair": pair.plain()}, indent=2))
    else:
        for role, found in nodes.items():
            findings.print_table(_title(role), found)
        findings.print_table("pair", pair.findings)
        pair.print()
    return int(any(map(findings.fail, (*nodes.values(), pair.findings))))


if __name__ == "__main__":
    sys.exit(main())
