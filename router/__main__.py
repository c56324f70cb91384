"""Entry point of `python -m router`: read the configuration and serve until stopped."""

import os
import sys
from collections.abc import Sequence

import uvloop

from api.program import processes
from api.program.serving import serve
from common import logs
from common.config import RouterConfig
from common.errors import ConfigError
from common.process import resources
from common.settings import read, wrong

_PROGRAM = "baton serve router"


def main(arguments: Sequence[str]) -> None:
    config = read(RouterConfig, _PROGRAM, arguments, about="Run a router.")
    logs.setup("router", config.server.log_level, config.server.log_format)
    resources.allow_many()
    # Texts are tokenized one at a time, so the library's thread pool is not needed.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        if config.processes > 1:
            raise SystemExit(uvloop.run(processes.keep(config)))
        uvloop.run(serve(config))
    except ConfigError as error:
        wrong(_PROGRAM, str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
