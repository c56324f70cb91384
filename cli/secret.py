"""baton secret: prints a new cluster secret, or what is made of the one that there is.

baton secret > FILE                 a new one, for --secret-file or BATON_SECRET of every program
baton secret --operator             the key that operators get in its place
baton secret --token Drain          a token for one call of a node's method, within a minute:
                                    grpcurl -H "authorization: Bearer $(baton secret --token Drain)"
"""

import argparse
import sys
from collections.abc import Sequence

from cli import client
from common import settings
from common.errors import ConfigError
from common.identity.roles import MAY_CALL
from common.identity.secret import VARIABLE, new_secret, operator_keys

PROGRAM = "baton secret"
_METHODS = {
    method.rpartition("/")[2]: method for method in MAY_CALL if "operator" in MAY_CALL[method]
}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = settings.ConfigArgumentParser(
        prog=PROGRAM,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--operator", action="store_true", help="print the operators' key")
    what.add_argument("--token", choices=sorted(_METHODS), help="print a token for one call of it")
    client.add_secret_flag(parser)
    return parser.parse_args(arguments)


def printed(options: argparse.Namespace) -> str:
    """Return the new secret, or the key or token derived from the current one.

    Raises:
        ConfigError: there is no secret to derive it from, or it is unusable.
    """
    if not (options.operator or options.token):
        return new_secret()
    identity = client.identity(options)
    if identity is None:
        raise ConfigError(f"there is no secret: neither --secret-file nor {VARIABLE}")
    if options.token:
        return identity.token(_METHODS[options.token]).text
    return operator_keys(identity.keyrings.current())[0]


if __name__ == "__main__":
    options = parse()
    try:
        print(printed(options))
    except ConfigError as error:
        settings.wrong(PROGRAM, str(error))
    sys.exit(0)
