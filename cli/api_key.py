"""`baton api-key NAME`: creates an API key, which is printed once and stored nowhere."""

import argparse
import json
import sys
from collections.abc import Sequence

from pydantic import ValidationError

from api.auth import api_keys
from api.auth.api_keys import KeyEntry, KeyLimits
from common import settings

_PROGRAM = "baton api-key"


def parser() -> settings.ConfigArgumentParser:
    parser = settings.ConfigArgumentParser(
        prog=_PROGRAM,
        description="Create an API key. The key is printed to standard error, once. Its entry, "
        "with the hash of the key, is printed to standard output. Append it to the file that "
        "routers have as --api-keys: baton api-key alice --requests-per-minute 60 >> keys.yaml",
    )
    parser.add_argument("name", metavar="NAME", help=KeyEntry.model_fields["name"].description)
    parser.add_argument(
        "--operator",
        action="store_const",
        const="operator",
        default="client",
        dest="role",
        help="create an operator's key (a client's key)",
    )
    for name in ("expires", "weight"):
        parser.add_argument(f"--{name}", help=KeyEntry.model_fields[name].description)
    parser.add_argument("--json", action="store_true", help="print key and entry as JSON")
    limits = parser.add_argument_group("limits", "A limit that is not set does not exist.")
    for name, field in KeyLimits.model_fields.items():
        limits.add_argument("--" + name.replace("_", "-"), metavar="N", help=field.description)
    return parser


def entry_from(options: argparse.Namespace, key: str) -> KeyEntry:
    """Return the entry for the API key file.

    Raises:
        ValidationError: a value is invalid.
    """
    given = {name: value for name, value in vars(options).items() if value is not None}
    limits = {name: given[name] for name in KeyLimits.model_fields if name in given}
    fields = {name: given[name] for name in KeyEntry.model_fields if name in given}
    return KeyEntry.model_validate({**fields, "limits": limits, "sha256": api_keys.hashed(key)})


def main(arguments: Sequence[str] | None = None) -> int:
    key = api_keys.new_key()
    try:
        options = parser().parse_args(arguments)
        entry = entry_from(options, key)
    except ValidationError as error:
        wrong = error.errors()[0]
        flag = str(wrong["loc"][-1]).replace("_", "-")
        settings.wrong(_PROGRAM, f"{flag}: {wrong['msg']}, got {wrong['input']!r}")
    if options.json:
        print(json.dumps({"key": key, "entry": api_keys.entry_text(entry)}))
        return 0
    print(f"The key of {entry.name}, shown this once:\n{key}", file=sys.stderr)
    sys.stdout.write(api_keys.entry_text(entry))
    return 0


if __name__ == "__main__":
    sys.exit(main())
