"""The role-independent parts of an engine process, and their life until the role ends: transfer
thread, control interface, and prefix sharing.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import triton

from common.config import EngineConfig, NodeConfig
from common.process.ipc import FrameSocket, PeerGone
from common.requests.namespace import NO_ADAPTER, SHARED, Namespace, made_with, within
from engine.batch.batch import BatchRunner
from engine.build import Engine
from engine.kv_cache.kv_events import CacheEvents, KvEventLog
from engine.loop.grouped import GroupedRole, GroupedRunner
from engine.loop.loop import EngineRole, EventLoop
from engine.loop.rebalancing import RebalancingRole
from engine.loop.step_clock import Lateness, StepClock
from engine.loop.watchdog import Watchdog, end_process, report_stall
from engine.memory_release import MemoryOccupation
from engine.meters import (
    adapter_gauges,
    expert_gauges,
    group_gauges,
    image_gauges,
    rank_gauges,
)
from engine.models.decoder import Decoder
from engine.offload.cache_tiers import tier_gauges
from engine.profiler import Profiler
from engine.ranks.lockstep import ShutdownStage
from engine.runner.forwards import Forwards
from kvtransfer import data_paths
from kvtransfer.backends.base import PagePool, PoolRegion, TransferBackend
from kvtransfer.frontend_messages import PairInput
from kvtransfer.pairing import PairHello
from kvtransfer.ports import TransferPort
from kvtransfer.transfer.consumer import ReadMetrics
from kvtransfer.transfer.device_page_bytes import page_bytes_of
from kvtransfer.transfer.node_paths import start_ranks
from kvtransfer.transfer.paths import TransferPaths
from kvtransfer.transfer.rank_paths import paths_of_rank
from kvtransfer.transfer.sides import PageAccess, both_sides
from kvtransfer.transfer.thread import LONGEST_SLEEP_S, TransferThread
from node.control.engine_control import (
    CacheReports,
    EngineControl,
    FrontendChannel,
    ReportSources,
    RoleEnded,
)
from node.control.operations import EngineOperations
from node.engine_process import EngineStart
from node.messages import EngineReady, GroupDrains
from node.role_parts import DrivenRole
from node.sharing.prefixes import PrefixSharing
from node.sharing.reads import SharedReads
from node.sharing.weights import WeightSharing


def introduce(engine: Engine, config: EngineConfig, channel: FrontendChannel) -> None:
    """Report to the frontend that the engine is ready for requests."""
    channel.post(
        EngineReady(
            model=config.model,
            fingerprint=engine.fingerprint,
            tokenizer_hash=engine.loaded.tokenizer_hash,
            context_length=engine.shape.context_length,
            num_pages=engine.shape.num_pages,
            page_size=engine.shape.layout.page_size,
            followers=engine.follower_pids,
            devices=engine.devices(config),
        )
    )


def drive(
    role: DrivenRole,
    engine: Engine,
    config: EngineConfig,
    clock: StepClock,
    steps: tuple[EngineRole, BatchRunner] | None = None,
) -> None:
    """Run the engine loop until the frontend releases this process (PeerGone) or gives it another
    role (RoleEnded), or a part fails. If the loop stalls for too long, the process ends.

    Args:
        steps: role and runner for the loop. None: the role itself, and the runner of the engine.
    """
    loop = EventLoop(
        *(steps or (role, engine.runner)),
        overlap=config.scheduler.overlap_schedule,
        overlap_prefills=config.scheduler.overlap_prefills,
        clock=clock,
    )

    def end(still_s: float) -> None:
        try:
            report_stall(still_s, role)
        finally:
            end_process()

    watchdog = Watchdog(
        clock,
        limit_s=config.scheduler.watchdog_timeout_s,
        has_work=lambda: role.scheduler.awaits_steps,
        on_stuck=end,
    )
    # All objects created until now stay, and collecting them again would delay steps. Before the
    # watchdog starts, because a slow collection is no stall.
    gc.collect()
    gc.freeze()
    watchdog.start()
    try:
        loop.run()
    finally:
        watchdog.stop()
        gc.unfreeze()  # otherwise leak checks of libraries report frozen objects at exit


TRANSFER_END_S = 3.0
_IN_A_GROUP = "the nodes of a group compute together: their weights and memory stay in place"

C = TypeVar("C", bound=NodeConfig)


@dataclass(frozen=True, slots=True, eq=False)
class NodeRuntime:
    """The role-independent parts of the engine, for one role. Nothing runs before `run`."""

    instance: int  # instance id by which peers identify this node's hand-offs
    channel: FrontendChannel
    clock: StepClock
    transfer: TransferThread
    control: EngineControl
    weights: WeightSharing
    sharing: PrefixSharing
    profiler: Profiler
    memory: MemoryOccupation

    @classmethod
    def of(
        cls,
        engine: Engine,
        start: EngineStart[C],
        prepare: Callable[[str], None],
        backends: Mapping[str, TransferBackend] | None = None,
    ) -> "NodeRuntime":
        """Create the parts.

        Args:
            prepare: see EngineControl.
            backends: by name. None: those that the configuration selects.
        Raises:
            ConfigError: no data path works on this machine, or memory for one is short.
        """
        channel, kv = start.channel, engine.pool
        clock = StepClock(first_step_s=start.config.engine.scheduler.first_step_timeout_s)
        if engine.shape.device.type == "cuda":
            clock.compiles.watch(triton.knobs.runtime)
        pool = PagePool(kv.base_address, kv.page_bytes, kv.num_pages, str(engine.shape.device))
        if backends is None:
            backends = data_paths.backends(start.config.transfer, tls=_has_tls(start))
        data_paths.rehearse(backends, pool)
        reads = ReadMetrics()
        paths, regions = _serve_pages(engine, start, pool, backends)
        transfer = _make_transfer(engine, start, clock, pool, paths, regions, reads)
        pinned = data_paths.why_pinned(backends, pool)
        memory = _make_memory(engine, start, PageAccess(transfer.post, paths.offers), pinned)
        profiler = engine.profiler(start.config.engine, start.role, lambda: clock.reading.finished)
        profiler.notify = channel.wake
        shared = SharedReads(start.instance, engine.cache, transfer)
        weights = _make_weights(engine, start, shared, transfer)
        fixed = "" if engine.group is None else _IN_A_GROUP
        operations = EngineOperations(engine.weights, weights, memory, profiler, why_fixed=fixed)

        def switch(role: str) -> None:
            operations.check_complete()
            prepare(role)

        meters, gauges = (clock.meter, clock.compiles, reads), tuple(_gauges(engine))
        control = EngineControl(
            channel,
            sources=ReportSources(clock, engine.pages.by_holder, shared.producers, meters, gauges),
            cache=_cache_reports(engine, start),
            adapters=engine.loader,
            operations=operations,
            prepare=clock.operation()(switch),
        )
        sharing = _make_sharing(engine, start, shared, transfer, weights)
        instance = start.instance
        return cls(instance, channel, clock, transfer, control, weights, sharing, profiler, memory)

    @property
    def port(self) -> TransferPort:
        """The port to the transfer thread, for hand-offs of requests."""
        return self.transfer

    def run(self, role: DrivenRole, engine: Engine, start: EngineStart[C]) -> None:
        """Run until the frontend releases this process (PeerGone) or gives it another role
        (RoleEnded).

        After a fault nothing is closed: the frontend must be notified at once, and closing could
        block on the part that failed. The process ends then.
        """
        config = start.config.engine
        self.transfer.start()
        introduce(engine, config, start.channel)
        try:
            drive(role, engine, config, self.clock, self.steps(role, engine, config))
        except (PeerGone, RoleEnded):
            self.transfer.stop(TRANSFER_END_S)
            self.profiler.close()
            self.memory.close()
            self.weights.close()
            raise

    def steps(
        self, role: DrivenRole, engine: Engine, config: EngineConfig
    ) -> tuple[EngineRole, BatchRunner] | None:
        """Return the role and runner that the loop must use for split prefill, balanced experts or
        a group. None: the role itself, and the runner of the engine.
        """
        if config.scheduler.split_prefill_ms:
            return role, engine.split_runner(config.scheduler, role.scheduler, self.clock)
        if engine.balancer is not None:
            return RebalancingRole(role, engine.balancer), engine.runner
        return self._group_steps(role, engine, config)

    def _group_steps(
        self, role: DrivenRole, engine: Engine, config: EngineConfig
    ) -> tuple[EngineRole, BatchRunner] | None:
        """Return a role and a runner whose steps begin together with those of other nodes of the
        group. None: this node is in no group.
        """
        if (group := engine.group) is None:
            return None
        control, model, forwards = self.control, engine.model, engine.runner.forwards
        assert isinstance(model, Decoder) and isinstance(forwards, Forwards)
        control.may_end = lambda: group.lockstep.is_drained

        def stage() -> ShutdownStage:
            if not control.draining:
                return ShutdownStage.SERVING
            return ShutdownStage.DRAINING if role.busy else ShutdownStage.DRAINED

        grouped = GroupedRole(
            role,
            group.lockstep,
            role.scheduler,
            self.clock,
            stage=stage,
            on_drain=lambda: control.notify(GroupDrains()),
            delays=config.scheduler.prefill_delayer,
        )
        return grouped, GroupedRunner(
            engine.runner, forwards, model, group.exchange, group.lockstep
        )


def _cache_reports(engine: Engine, start: EngineStart[C]) -> CacheReports:
    post = start.channel.post
    if start.config.kv_events.publisher == "null":
        return CacheReports(CacheEvents(engine.cache), post)

    def adapter_of(namespace: Namespace) -> str | None:
        adapters = {"": NO_ADAPTER, **engine.loader.names()}
        weights = engine.weights.id
        shared = {made_with(within(SHARED, id_), weights): name for name, id_ in adapters.items()}
        return shared.get(namespace)

    events = KvEventLog(engine.cache, adapter_of, start.config.engine.parallel.dp_rank)
    return CacheReports(CacheEvents(events), post, events)


def _make_transfer(
    engine: Engine,
    start: EngineStart[C],
    clock: StepClock,
    pool: PagePool,
    paths: TransferPaths,
    regions: tuple[PoolRegion, ...],
    reads: ReadMetrics,
) -> TransferThread:
    steps, shape = start.config.engine.scheduler, engine.shape
    frames: FrameSocket[PairInput] = FrameSocket(start.transfer_socket, PairInput)
    hello = PairHello.of(
        start.instance,
        start.address,
        engine.fingerprint,
        regions,
        shape.layout.state_pages,
        start.config.engine.parallel.pp,
    )
    return TransferThread(
        frames,
        both_sides(
            start.config.transfer,
            shape.layout.tables,
            hello,
            partial(page_bytes_of, pool),
            paths,
            reads,
            max_unconsumed_tokens=steps.max_queued_tokens,
        ),
        engine_late_s=Lateness(clock, LONGEST_SLEEP_S).look,
        stall_s=steps.step_timeout_s,
        wake_engine=start.channel.wake,
    )


def _serve_pages(
    engine: Engine,
    start: EngineStart[C],
    pool: PagePool,
    backends: Mapping[str, TransferBackend],
) -> tuple[TransferPaths, tuple[PoolRegion, ...]]:
    """Serve the pages of all ranks. Returns the paths of this node, and its pages by rank."""
    config, share, region = start.config.transfer, engine.loaded.share, pool.region
    own = paths_of_rank(
        share.node_rank,
        share.node,
        pool,
        config,
        backends,
        engine.shape.whole.pages_by_rank,
        start.instance,
    )
    if share.num_ranks == 1:
        return own, (region,)
    ask = engine.ask_followers
    paths, others = start_ranks(own, config, ask, tls=_has_tls(start), instance=start.instance)
    return paths, (region, *others)


def _has_tls(start: EngineStart[C]) -> bool:
    return start.config.server.tls.cert is not None


def _make_memory(
    engine: Engine, start: EngineStart[C], peers: PageAccess, pinned: str
) -> MemoryOccupation:
    """Return the access to releasable memory. Memory in a region is isolated, not pinned."""
    is_region = engine.pool.region is not None
    return MemoryOccupation(
        engine.weights,
        engine.pages,
        engine.page_memory,
        "" if is_region else pinned,
        start.channel.wake,
        peers if is_region else None,
    )


def _gauges(engine: Engine) -> Iterator[Callable[[], Mapping[str, float]]]:
    """Yield functions that return the gauges of the parts that this engine has."""
    yield engine.core.table.gauges
    if engine.adapters.bank.num_slots:
        yield partial(adapter_gauges, engine.adapters)
    if engine.tiers is not None:
        yield partial(tier_gauges, engine.tiers, engine.pool.page_bytes)
    if engine.model.seeing is not None and engine.encoder is not None:
        yield partial(image_gauges, engine.model.seeing, engine.encoder)
    if engine.loaded.followers is not None:
        yield partial(rank_gauges, engine.loaded.followers)
    if engine.group is not None:
        yield partial(group_gauges, engine.group.lockstep)
    if engine.balancer is not None:
        yield partial(expert_gauges, engine.balancer)


def _make_weights(
    engine: Engine,
    start: EngineStart[C],
    shared: SharedReads,
    transfer: TransferThread,
) -> WeightSharing:
    return WeightSharing(
        engine.weights,
        shared,
        cache=engine.cache,
        pages=engine.pages,
        pool=engine.pool.tensor,
        port=transfer,
        notify=start.channel.wake,
    )


def _make_sharing(
    engine: Engine,
    start: EngineStart[C],
    shared: SharedReads,
    transfer: TransferThread,
    weights: WeightSharing,
) -> PrefixSharing:
    return PrefixSharing(
        start.config.prefix_sharing,
        shared,
        transfer,
        core=engine.core,
        page_bytes=engine.pool.page_bytes,
        weights=weights,
    )
