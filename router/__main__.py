"""`python -m router`: reads the configuration and serves until told to stop."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence

import uvloop

from common import logs, rpc
from common.cli.settings import read, wrong
from common.config import RouterConfig
from common.errors import ConfigError, InvalidRequest
from router import model_files
from router.assembly import running

log = logging.getLogger(__name__)

_PROGRAM = "router"


def main(arguments: Sequence[str]) -> None:
    config = read(RouterConfig, _PROGRAM, arguments)
    logs.setup(_PROGRAM, config.front.log_level)
    # One text at a time gains nothing from the library's thread pool.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        check_addresses(config)
        uvloop.run(serve(config))
    except ConfigError as error:
        wrong(_PROGRAM, str(error))


async def serve(config: RouterConfig) -> None:
    """Runs a router until SIGTERM or SIGINT, then drains it; a second signal cuts that short."""
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    model = await asyncio.to_thread(model_files.load, config.model)
    async with running(config, model) as router:
        await stop.wait()
        await router.drain(config.front.drain_s, hurry)
    log.info("stopped")


def check_addresses(config: RouterConfig) -> None:
    """Raises ConfigError for addresses that cannot be a cluster."""
    if not config.decode:
        raise ConfigError("--decode: at least one decode node is needed")
    addresses = (*config.prefill, *config.decode)
    for address in addresses:
        try:
            rpc.check_address(address)
        except InvalidRequest as error:
            raise ConfigError(f"--prefill, --decode: {error}") from error
        if addresses.count(address) > 1:
            raise ConfigError(f"--prefill, --decode: {address} is named twice")


if __name__ == "__main__":
    main(sys.argv[1:])
