"""What an engine does as a decode node's: transfer thread and role, joined to a loop."""

import time
from collections.abc import Callable

from common.config import DecodeConfig
from common.engine.adapters.meter import AdapterMeter
from common.engine.build import Engine
from common.engine.drive import drive, introduce
from common.engine.loop.clock import StepClock
from common.engine.memory.cache_events import CacheEvents
from common.engine.memory.tier_meter import TierMeter
from common.errors import ConfigError
from common.node.desk import Desk
from common.node.engine_process import EngineStart
from common.node.ipc import FrameSocket
from common.node.operations import Operations
from common.node.outbox import Outbox
from decode_node.role import DecodeRole
from kvtransfer import data_paths
from kvtransfer.backends.base import PagePool
from kvtransfer.front_messages import PairInput
from kvtransfer.pairing import Hello
from kvtransfer.ports import NodeCommand, NodeEvent
from kvtransfer.transfer.both import both_sides
from kvtransfer.transfer.read_meter import ReadMeter
from kvtransfer.transfer.thread import TransferThread
from sharing.prefixes import PrefixSharing

TRANSFER_END_S = 3.0


def check(engine: Engine) -> None:
    """Raises ConfigError where its model is none for decode nodes."""
    if not engine.model.spec.generates:
        raise ConfigError("the model has no head for tokens; prefill nodes serve what it can do")


def serve(engine: Engine, start: EngineStart[DecodeConfig], prepare: Callable[[str], None]) -> None:
    """Until the front lets this process go (PeerGone), or has another role for it (RoleOver).

    Args:
        prepare: see Desk.
    """
    config, channel = start.config, start.channel
    steps = config.engine.scheduler
    clock = StepClock(stall_s=steps.stall_s, first_step_s=steps.first_step_s)
    kv = engine.pool
    pool = PagePool(kv.base_address, kv.page_bytes, kv.num_pages, str(engine.shape.device))
    tables = engine.shape.layout.tables
    hello = Hello.of(start.instance, start.address, engine.fingerprint, pool)
    frames: FrameSocket[PairInput] = FrameSocket(start.transfer_socket, PairInput)
    paths = data_paths.backends(config.transfer, tls=config.front.tls.cert is not None)
    data_paths.rehearse(paths, pool)
    owners = data_paths.serve(paths, pool, start.instance)
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
    profiler = engine.profiler(config.engine, "decode", lambda: clock.reading.finished)
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
    sharing = PrefixSharing(
        config.sharing,
        instance=start.instance,
        page_bytes=kv.page_bytes,
        cache=engine.cache,
        pages=engine.pages,
        tiers=engine.tiers,
        tables=tables,
        port=transfer,
    )
    scheduler = engine.scheduler(config.engine, lambda request, holding: sharing.admitted(request))
    role = DecodeRole(
        config=config,
        instance=start.instance,
        scheduler=scheduler,
        pages=engine.pages,
        cache=engine.cache,
        tables=tables,
        page_bytes=kv.page_bytes,
        limits=engine.limits,
        port=transfer,
        desk=desk,
        outbox=Outbox(channel),
        adapters=engine.adapters,
        guides=engine.guides,
        sharing=sharing,
        tiers=engine.tiers,
    )
    profiler.tell = channel.wake
    transfer.start()
    introduce(engine, config.engine, channel)
    try:
        drive(role, engine, config.engine, scheduler, clock)
    finally:
        transfer.stop(TRANSFER_END_S)
        profiler.close()
