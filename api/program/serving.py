"""Runs a router from start to shutdown: the only process, or one of several worker processes."""

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable

import msgspec
import uvloop

from api.program.assembly import run_router
from api.text import model_files
from common import logs
from common.config import RouterConfig
from common.errors import ConfigError
from common.process import resources
from common.settings import wrong
from router.workers import ProcessSlot

log = logging.getLogger(__name__)

# Allocations before the garbage collector checks the youngest objects. Requests have few reference
# cycles: the default of 700 would check the objects of a request twenty times in vain.
_COLLECT_EVERY = 50_000


async def serve(
    config: RouterConfig,
    place: ProcessSlot | None = None,
    *,
    on_up: Callable[[], None] = lambda: None,
) -> None:
    """Run a router until SIGTERM, SIGINT or an operator's Drain, then drain it.

    A second signal cuts the drain short.

    Args:
        place: position of this process among the worker processes. None: it is the only one.
        on_up: called when the router listens.
    """
    resources.hold_little()
    stop, hurry = asyncio.Event(), asyncio.Event()
    signals = 0

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        (hurry if signals > 1 else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    files = [await asyncio.to_thread(model_files.load, each.model) for each in config.each_model]
    async with run_router(config, files, place, on_drain=stop.set) as router:
        resources.stay()
        gc.set_threshold(_COLLECT_EVERY)
        on_up()
        await stop.wait()
        await router.drain(config.server.drain_timeout_s, hurry)
    log.info("stopped")


def main(up: str, place_json: str, config_json: str) -> None:
    """Run a worker process.

    Args:
        up: file descriptor, written to when this process listens.
        place_json: a ProcessSlot.
        config_json: a RouterConfig.
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
