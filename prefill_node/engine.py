"""What an engine does as a prefill node's: transfer thread and role, joined to a loop."""

import time
from collections.abc import Callable

from common.config import EngineConfig, PrefillConfig
from common.engine.adapters.meter import AdapterMeter
from common.engine.build import Engine
from common.engine.drive import drive, introduce
from common.engine.loop.clock import StepClock
from common.engine.memory.cache_events import CacheEvents
from common.engine.memory.tier_meter import TierMeter
from common.node.desk import Desk
from common.node.engine_process import EngineStart
from common.node.ipc import FrameSocket
from common.node.operations import Operations
from kvtransfer import data_paths
from kvtransfer.backends.base import PagePool
from kvtransfer.front_messages import PairInput
from kvtransfer.pairing import Hello
from kvtransfer.ports import NodeCommand, NodeEvent
from kvtransfer.transfer.both import both_sides
from kvtransfer.transfer.read_meter import ReadMeter
from kvtransfer.transfer.thread import TransferThread
from prefill_node.role import PrefillRole
from sharing.prefixes import PrefixSharing

TRANSFER_END_S = 3.0


def without_decode(config: EngineConfig) -> EngineConfig:
    """What of an engine a prefill node has use for. Its requests end with their first token: none
    grows until it must be retracted to host memory, and no step is one of decode rows alone."""
    cache = config.cache.model_copy(update={"host_pages": 0})
    return config.model_copy(update={"cache": cache, "cuda_graphs": False})


def serve(
    engine: Engine, start: EngineStart[PrefillConfig], prepare: Callable[[str], None]
) -> None:
    """Until the front lets this process go (PeerGone), or has another role for it (RoleOver).

    Args:
        engine: built, or equipped, `without_decode`.
        prepare: see Desk.
    """
    config, channel = start.config, start.channel
    steps = config.engine.scheduler
    clock = StepClock(stall_s=steps.stall_s, first_step_s=steps.first_step_s)
    kv = engine.pool
    pool = PagePool(kv.base_address, kv.page_bytes, kv.num_pages, str(engine.shape.device))
    paths = data_paths.backends(config.transfer, tls=config.front.tls.cert is not None)
    owners = data_paths.serve(paths, pool, start.instance)
    tables = engine.shape.layout.tables
    hello = Hello.of(start.instance, start.address, engine.fingerprint, pool)
    frames: FrameSocket[PairInput] = FrameSocket(start.transfer_socket, PairInput)
    reads = ReadMeter(kv.page_bytes)
    transfer: TransferThread[NodeCommand, NodeEvent] = TransferThread(
        frames,
        both_sides(
            config.transfer,
            tables,
            hello,
            pool,
            paths,
            owners,
            reads,
            max_untaken_tokens=config.engine.scheduler.max_waiting_tokens,
        ),
        engine_moves=lambda: clock.reading.is_moving(time.monotonic()),
        wake_engine=channel.wake,
    )
    profiler = engine.profiler(config.engine, "prefill", lambda: clock.reading.finished)
    desk = Desk(
        channel,
        pages_by_holder=engine.pages.by_holder,
        steps_finished=lambda: clock.reading.finished,
        meters=(
            clock.meter,
            reads,
            AdapterMeter(engine.adapters),
            TierMeter(engine.tiers, kv.page_bytes),
        ),
        cache=CacheEvents(engine.cache),
        adapters=engine.loader,
        operations=Operations(engine.weights, profiler),
        prepare=prepare,
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
        adapters=engine.adapters,
        guides=engine.guides,
        sharing=PrefixSharing(
            config.sharing,
            instance=start.instance,
            page_bytes=kv.page_bytes,
            cache=engine.cache,
            pages=engine.pages,
            tiers=engine.tiers,
            tables=tables,
            port=transfer,
        ),
        tiers=engine.tiers,
    )
    profiler.tell = channel.wake
    transfer.start()
    introduce(engine, config.engine, channel)
    try:
        drive(role, engine, config.engine, role.scheduler, clock)
    finally:
        transfer.stop(TRANSFER_END_S)
        profiler.close()
