"""An engine process's main thread: introduces the engine to its front, then turns the loop."""

import gc
import logging
from collections.abc import Mapping

from common.config import EngineConfig
from common.engine.build import Engine
from common.engine.loop.clock import StepClock
from common.engine.loop.loop import EventLoop, Role
from common.engine.loop.watchdog import Watchdog
from common.engine.schedule.scheduler import Scheduler
from common.logs import kv
from common.node.desk import Channel
from common.node.messages import EngineReady

log = logging.getLogger(__name__)


def introduce(engine: Engine, config: EngineConfig, channel: Channel) -> None:
    """Tells the front that requests may come."""
    channel.post(
        EngineReady(
            model=config.model,
            fingerprint=engine.fingerprint,
            tokenizer_hash=engine.tokenizer_hash,
            context_length=engine.shape.context_length,
            num_pages=engine.shape.num_pages,
            page_size=engine.shape.layout.page_size,
        )
    )


def drive(
    role: Role, engine: Engine, config: EngineConfig, scheduler: Scheduler, clock: StepClock
) -> None:
    """Turns the loop until the front lets this process go (PeerGone), or a part fails."""
    loop = EventLoop(
        role,
        engine.runner,
        overlap=config.scheduler.overlap,
        overlap_prefills=config.scheduler.overlap_prefills,
        clock=clock,
    )

    def report(stuck_s: float, state: Mapping[str, object]) -> None:
        clock.meter.standstills += 1
        log.error("no step has finished with work waiting %s", kv(seconds=stuck_s, **state))

    watchdog = Watchdog(
        clock,
        limit_s=config.scheduler.watchdog_s,
        has_work=lambda: scheduler.has_work,
        dump=scheduler.queues,
        on_stuck=report,
    )
    watchdog.start()
    # What was made until now stays; collecting it again and again would only hold up steps.
    gc.collect()
    gc.freeze()
    try:
        loop.run()
    finally:
        watchdog.stop()
        engine.stream.close()
        gc.unfreeze()  # or the libraries' own leak checks complain of what is frozen, at exit
