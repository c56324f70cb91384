"""`baton cluster-secret`: creates a cluster secret, or derives a key or token from one."""

import argparse
import json
import sys

from cli import client
from common import settings
from common.errors import ConfigError
from common.identity.guard import MAY_CALL
from common.identity.secret import VARIABLE, new_secret, operator_keys

PROGRAM = "baton cluster-secret"
_METHODS = {
    method.rpartition("/")[2]: method for method in MAY_CALL if "operator" in MAY_CALL[method]
}


_DESCRIPTION = """Create a cluster secret, or derive a key or token from the current one.

baton cluster-secret > FILE          new secret, for --secret-file or BATON_SECRET of every process
baton cluster-secret --operator      key for operators, who do not need the secret
baton cluster-secret --token Drain   token for one call of a node, valid for a minute:
                                     grpcurl -H "authorization: Bearer TOKEN" ...
"""


def parser() -> settings.ConfigArgumentParser:
    parser = settings.ConfigArgumentParser(
        prog=PROGRAM,
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--operator", action="store_true", help="print the key for operators")
    kind.add_argument(
        "--token", choices=sorted(_METHODS), help="print a token for one call of this method"
    )
    client.add_secret_flag(parser)
    client.add_json_flag(parser)
    return parser


def printed(options: argparse.Namespace) -> str:
    """Return the new secret, or the key or token derived from the current one.

    Raises:
        ConfigError: there is no secret, or it is unusable.
    """
    if not (options.operator or options.token):
        return new_secret()
    identity = client.identity(options)
    if identity is None:
        raise ConfigError(
            f"the cluster secret is missing: set --secret-file or the variable {VARIABLE}"
        )
    if options.token:
        return identity.token(_METHODS[options.token]).text
    return operator_keys(identity.keyrings.current())[0]


if __name__ == "__main__":
    options = parser().parse_args()
    try:
        text = printed(options)
    except ConfigError as error:
        settings.wrong(PROGRAM, str(error))
    kind = "operator_key" if options.operator else "token" if options.token else "secret"
    print(json.dumps({kind: text}) if options.json else text)
    sys.exit(0)
