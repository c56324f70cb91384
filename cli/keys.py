"""baton keys new NAME: makes an API key, which is shown once and kept nowhere.

The key goes to standard error; its entry, with the key's hash, to standard output, to be appended
to the file that routers have as --api-keys:

    baton keys new alice --requests-per-minute 60 >> keys.yaml
"""

import argparse
import sys
from collections.abc import Sequence

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from api.auth import api_keys
from api.auth.api_keys import KeyEntry, KeyLimits
from common import settings

_PROGRAM = "baton keys new"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = settings.ConfigArgumentParser(
        prog="baton keys",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    new = parser.add_subparsers(metavar="new", required=True, dest="what").add_parser(
        "new", help="make one", description="Makes an API key."
    )
    new.add_argument("name", metavar="NAME", help=_about(KeyEntry.model_fields["name"]))
    new.add_argument(
        "--operator", action="store_const", const="operator", default="client", dest="role"
    )
    for name in ("expires", "weight"):
        new.add_argument(f"--{name}", help=_about(KeyEntry.model_fields[name]))
    limits = new.add_argument_group("limits", "Without one there is none.")
    for name, field in KeyLimits.model_fields.items():
        limits.add_argument("--" + name.replace("_", "-"), metavar="N", help=_about(field))
    return parser.parse_args(arguments)


def entry_from(options: argparse.Namespace, key: str) -> KeyEntry:
    """
    Raises:
        ValidationError: a value is wrong.
    """
    given = {name: value for name, value in vars(options).items() if value is not None}
    limits = {name: given[name] for name in KeyLimits.model_fields if name in given}
    fields = {name: given[name] for name in KeyEntry.model_fields if name in given}
    return KeyEntry.model_validate({**fields, "limits": limits, "sha256": api_keys.hashed(key)})


def _about(field: FieldInfo) -> str | None:
    return field.description


def main(arguments: Sequence[str] | None = None) -> int:
    key = api_keys.new_key()
    try:
        entry = entry_from(parse(arguments), key)
    except ValidationError as error:
        wrong = error.errors()[0]
        flag = str(wrong["loc"][-1]).replace("_", "-")
        settings.wrong(_PROGRAM, f"{flag}: {wrong['msg']}, got {wrong['input']!r}")
    print(f"The key of {entry.name}, shown this once:\n{key}", file=sys.stderr)
    sys.stdout.write(api_keys.entry_text(entry))
    return 0


if __name__ == "__main__":
    sys.exit(main())
