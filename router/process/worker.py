"""`python -m router.worker`: one of the processes that router/process/processes.py keeps."""

import os
import sys

import uvloop

from common import logs
from common.config import RouterConfig
from common.errors import ConfigError
from common.settings import wrong
from router.process.serving import serve


def main(number: str, up: str, config_json: str) -> None:
    """
    Args:
        number: tells this process from its siblings, in the log.
        up: a descriptor, written to once this process listens.
    """
    config = RouterConfig.model_validate_json(config_json)
    logs.setup(f"router/{number}", config.front.log_level, config.front.log_format)

    def tell() -> None:
        os.write(int(up), b"up")
        os.close(int(up))

    try:
        uvloop.run(serve(config, shares_ports=True, on_up=tell))
    except ConfigError as error:
        wrong("baton router", str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
