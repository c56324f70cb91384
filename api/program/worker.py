"""`python -m api.program.worker`: a worker process of api/program/processes.py."""

import os
import sys

import msgspec
import uvloop

from api.program.serving import serve
from common import logs
from common.config import RouterConfig
from common.errors import ConfigError
from common.settings import wrong
from router.workers import ProcessSlot


def main(up: str, place_json: str, config_json: str) -> None:
    """Run a worker process.

    Args:
        up: a file descriptor that is written to when this process listens.
    """
    place = msgspec.json.decode(place_json, type=ProcessSlot)
    config = RouterConfig.model_validate_json(config_json)
    logs.setup(f"router/{place.number}", config.server.log_level, config.server.log_format)

    def report() -> None:
        os.write(int(up), b"up")
        os.close(int(up))

    try:
        uvloop.run(serve(config, place, on_up=report))
    except ConfigError as error:
        wrong("baton serve router", str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
