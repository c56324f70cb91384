"""The main thread of an engine process: announces the engine to its front, then runs the loop."""

import gc
from typing import Protocol

from common.config import EngineConfig
from engine.build import Engine
from engine.loop import watchdog
from engine.loop.clock import StepClock
from engine.loop.loop import EngineRole, EventLoop
from engine.loop.watchdog import StalledEngine, Watchdog
from engine.scheduler.scheduler import Scheduler
from node.control.engine_control import FrontendChannel
from node.messages import EngineReady


class DrivenRole(EngineRole, StalledEngine, Protocol):
    """A role, as the event loop and the stall report need it."""

    @property
    def scheduler(self) -> Scheduler: ...


def introduce(engine: Engine, config: EngineConfig, channel: FrontendChannel) -> None:
    """Report to the front that requests may come."""
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


def drive(role: DrivenRole, engine: Engine, config: EngineConfig, clock: StepClock) -> None:
    """Run the loop until the front releases this process (PeerGone) or gives it another role
    (RoleEnded), or a part fails. If the loop stalls for too long, the process ends.
    """
    loop = EventLoop(
        role,
        engine.runner,
        overlap=config.scheduler.overlap_schedule,
        overlap_prefills=config.scheduler.overlap_prefills,
        clock=clock,
    )

    def end(still_s: float) -> None:
        try:
            watchdog.report(still_s, role)
        finally:
            watchdog.end_process()

    dog = Watchdog(
        clock,
        limit_s=config.scheduler.watchdog_timeout_s,
        has_work=lambda: role.scheduler.awaits_steps,
        on_stuck=end,
    )
    # All objects made until now stay, and collecting them again would only delay steps. This
    # happens before the watchdog starts, since a slow collection is no stall of the loop.
    gc.collect()
    gc.freeze()
    dog.start()
    try:
        loop.run()
    finally:
        dog.stop()
        gc.unfreeze()  # otherwise the libraries' own leak checks report frozen objects at exit
