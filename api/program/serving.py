"""A router from its start to its end by a signal: the one program, or one of several processes."""

import asyncio
import gc
import logging
import signal
from collections.abc import Callable

from api.program.assembly import running
from api.text import model_files
from common.config import RouterConfig
from common.process import allocator
from router.workers.place import Place

log = logging.getLogger(__name__)

# Objects made and not freed until the collector looks at the youngest. Of a request little is part
# of a cycle: at the default of 700 it is looked at twenty times over in vain.
_COLLECT_EVERY = 50_000


async def serve(
    config: RouterConfig, place: Place | None = None, *, on_up: Callable[[], None] = lambda: None
) -> None:
    """Runs a router until SIGTERM, SIGINT or an operator's Drain, then drains it; a second signal
    cuts that short.

    Args:
        place: of this process among those of its router; None: there is no other.
        on_up: called once it listens.
    """
    allocator.hold_little()
    stop, hurry = asyncio.Event(), asyncio.Event()
    signals = 0

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        (hurry if signals > 1 else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    model = await asyncio.to_thread(model_files.load, config.model)
    async with running(config, model, place, on_drain=stop.set) as router:
        allocator.stay()
        gc.set_threshold(_COLLECT_EVERY)
        on_up()
        await stop.wait()
        await router.drain(config.front.drain_s, hurry)
    log.info("stopped")
