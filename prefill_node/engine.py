"""The engine process of a prefill node: engine, transfer thread and role, joined to a loop."""

import time
from collections.abc import Callable

from common.config import EngineConfig, PrefillConfig
from common.engine.build import build
from common.engine.drive import drive, introduce
from common.engine.loop.clock import StepClock
from common.engine.memory.cache_events import CacheEvents
from common.node.desk import Desk
from common.node.engine_process import EngineStart, run_engine
from common.node.ipc import FrameSocket
from kvtransfer import data_paths
from kvtransfer.backends.base import PagePool
from kvtransfer.front_messages import PairInput
from kvtransfer.pairing import Hello
from kvtransfer.ports import OwnerCommand, OwnerEvent
from kvtransfer.protocol.owner_end import OwnerEnd
from kvtransfer.transfer.page_sums import PageSums
from kvtransfer.transfer.publisher import Publisher
from kvtransfer.transfer.thread import Outlet, TransferThread
from prefill_node.role import PrefillRole

TRANSFER_END_S = 3.0


def without_decode(config: EngineConfig) -> EngineConfig:
    """What of an engine a prefill node has use for. Its requests end with their first token: none
    grows until it must be retracted to host memory, and no step is one of decode rows alone."""
    cache = config.cache.model_copy(update={"host_pages": 0})
    return config.model_copy(update={"cache": cache, "cuda_graphs": False})


def body(start: EngineStart[PrefillConfig]) -> None:
    config, channel = start.config, start.channel
    engine = build(without_decode(config.engine))
    steps = config.engine.scheduler
    clock = StepClock(stall_s=steps.stall_s, first_step_s=steps.first_step_s)
    kv = engine.pool
    pool = PagePool(kv.base_address, kv.page_bytes, kv.num_pages, str(engine.shape.device))
    paths = data_paths.backends(config.transfer, tls=config.front.tls.cert is not None)
    owners = data_paths.serve(paths, pool, start.instance)
    tables = engine.shape.layout.tables
    hello = Hello.of(start.instance, start.address, engine.fingerprint, pool)
    frames: FrameSocket[PairInput] = FrameSocket(start.transfer_socket, PairInput)

    def publisher(outlet: Outlet[OwnerEvent], wake: Callable[[], None]) -> Publisher:
        return Publisher(
            OwnerEnd(config.transfer, tables),
            hello,
            owners,
            outlet,
            wake,
            PageSums(pool, config.transfer.check_every),
            max_untaken_tokens=config.engine.scheduler.max_waiting_tokens,
        )

    transfer: TransferThread[OwnerCommand, OwnerEvent] = TransferThread(
        frames,
        publisher,
        engine_moves=lambda: clock.reading.is_moving(time.monotonic()),
        wake_engine=channel.wake,
    )
    desk = Desk(
        channel,
        pages_by_holder=engine.pages.by_holder,
        steps_finished=lambda: clock.reading.finished,
        meters=(clock.meter,),
        cache=CacheEvents(engine.cache),
    )
    role = PrefillRole(
        make_scheduler=lambda on_admit: engine.scheduler(config.engine, on_admit),
        pages=engine.pages,
        tables=tables,
        limits=engine.limits,
        max_waiting=config.engine.scheduler.max_waiting,
        max_waiting_tokens=config.engine.scheduler.max_waiting_tokens,
        port=transfer,
        desk=desk,
        guides=engine.guides,
    )
    engine.guides.tell = channel.wake
    transfer.start()
    introduce(engine, config.engine, channel)
    try:
        drive(role, engine, config.engine, role.scheduler, clock)
    finally:
        transfer.stop(TRANSFER_END_S)
        engine.guides.close()


if __name__ == "__main__":
    run_engine(PrefillConfig, body, "prefill engine")
