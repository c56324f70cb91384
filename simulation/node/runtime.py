"""The parts of a simulated engine for one role, like NodeRuntime for a real engine."""

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from common.config import NodeConfig
from common.copy_map import ONE_RANK
from common.process.ipc import FrameSocket, PeerGone
from engine.kv_cache.kv_events import CacheEvents
from engine.loop.loop import EventLoop
from engine.loop.step_clock import Lateness, StepClock
from engine.offload.cache_tiers import tier_gauges
from kvtransfer.backends.base import PagePool, PoolRegion
from kvtransfer.frontend_messages import PairInput
from kvtransfer.pairing import PairHello
from kvtransfer.ports import TransferPort
from kvtransfer.protocol.progress import EventOutlet
from kvtransfer.transfer.consumer import ReadMetrics
from kvtransfer.transfer.paths import ComparedBytes, HostPageBytes, TransferPaths
from kvtransfer.transfer.sides import TransferSides, both_sides
from kvtransfer.transfer.thread import LONGEST_SLEEP_S, Transfer
from node.control.engine_control import (
    CacheReports,
    EngineControl,
    FrontendChannel,
    ReportSources,
)
from node.messages import EngineReady, StartRole
from node.role_parts import DrivenRole
from node.sharing.prefixes import PrefixSharing
from node.sharing.reads import SharedReads
from simulation.node.link import BACKEND, ReadPort, SimLinks, SimOffers, WireTo
from simulation.node.parts import SimOperations, SimParts
from simulation.node.tokenizer import tokenizer_hash

log = logging.getLogger(__name__)

_FLUSH_S = 0.01  # seconds between two attempts to send to a frontend that does not read


class WakingChannel(FrontendChannel, Protocol):
    """Channel to the frontend that can be woken."""

    def wake(self) -> None: ...


class TransferDriver:
    """Runs a Transfer on the event loop, instead of on a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transfer: Transfer
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self._is_next = False  # the next turn is scheduled
        self._ended = False

    def start(self, transfer: Transfer) -> None:
        self._transfer = transfer
        transfer.open()
        self._loop.add_reader(transfer.fileno(), self.wake)
        self.wake()

    def wake(self) -> None:
        """Schedule a turn."""
        if not (self._is_next or self._ended):
            self._is_next = True
            self._loop.call_soon(self._turn)

    def stop(self) -> None:
        """End all streams and links. Idempotent."""
        if self._ended:
            return
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._transfer.fileno())
        self._transfer.close()

    def _turn(self) -> None:
        self._is_next = False
        if self._ended:
            return
        if self._timer is not None:
            self._timer.cancel()
        try:
            self._transfer.turn()
        except PeerGone:
            self.stop()  # the engine's own socket reports the same
            return
        except Exception as fault:
            log.exception("the transfer failed")
            self._transfer.fail(fault)
            self.stop()
            return
        wait_s = self._transfer.due_in_s()
        if self._transfer.wants_write:
            wait_s = min(wait_s, _FLUSH_S)
        self._timer = self._loop.call_later(wait_s, self.wake)


@dataclass(frozen=True, slots=True, eq=False)
class SimRuntime:
    """The parts of a simulated engine for one role, which start with `begin`. See RoleRuntime."""

    instance: int
    channel: WakingChannel
    control: EngineControl
    sharing: PrefixSharing
    config: NodeConfig
    clock: StepClock
    transfer: Transfer
    driver: TransferDriver

    @classmethod
    def of(
        cls,
        parts: SimParts,
        start: StartRole,
        config: NodeConfig,
        channel: WakingChannel,
        transfer_socket: socket.socket,
        wire_to: WireTo,
    ) -> "SimRuntime":
        """Make the parts. Takes ownership of `transfer_socket`."""
        clock = StepClock(first_step_s=config.engine.scheduler.first_step_timeout_s)
        reads, driver, tiers = ReadMetrics(), TransferDriver(), parts.core.tiers
        frames: FrameSocket[PairInput] = FrameSocket(transfer_socket, PairInput)
        transfer = Transfer(
            frames,
            _sides(parts, start, config, reads, wire_to),
            wake=driver.wake,
            engine_late_s=Lateness(clock, LONGEST_SLEEP_S).look,
            stall_s=config.engine.scheduler.step_timeout_s,
            wake_engine=channel.wake,
        )
        shared = SharedReads(start.instance, parts.core.cache, transfer)
        control = EngineControl(
            channel,
            sources=ReportSources(
                clock,
                parts.core.pages.by_holder,
                shared.producers,
                meters=(clock.meter, reads, parts.runner),
                gauges=() if tiers is None else (partial(tier_gauges, tiers, parts.page_bytes),),
            ),
            cache=CacheReports(CacheEvents(parts.core.cache), channel.post),
            adapters=parts.adapters,
            operations=SimOperations(),
            prepare=_prepare,
        )
        sharing = PrefixSharing(
            config.prefix_sharing,
            shared,
            transfer,
            core=parts.core,
            page_bytes=parts.page_bytes,
            weights=None,
        )
        return cls(start.instance, channel, control, sharing, config, clock, transfer, driver)

    @property
    def port(self) -> TransferPort:
        return self.transfer

    def begin(self, parts: SimParts) -> None:
        """Start pairing, and report to the frontend that requests are accepted."""
        self.driver.start(self.transfer)
        parts.copier.notify = self.channel.wake
        engine = self.config.engine
        self.channel.post(
            EngineReady(
                model=engine.model,
                fingerprint=dict(parts.fingerprint),
                tokenizer_hash=tokenizer_hash(engine.model),
                context_length=parts.core.limits.context_length,
                num_pages=parts.core.limits.num_pages,
                page_size=parts.core.shape.tables.page_size,
                devices=(engine.device,),
            )
        )

    def loop(self, role: DrivenRole, parts: SimParts) -> EventLoop:
        steps = self.config.engine.scheduler
        return EventLoop(
            role,
            parts.runner,
            overlap=steps.overlap_schedule,
            overlap_prefills=steps.overlap_prefills,
            clock=self.clock,
        )

    def close(self) -> None:
        self.driver.stop()


def _prepare(role: str) -> None:
    """Do nothing: a simulated engine needs no preparation for a role."""


def _sides(
    parts: SimParts, start: StartRole, config: NodeConfig, reads: ReadMetrics, wire_to: WireTo
) -> Callable[[EventOutlet, Callable[[], None]], TransferSides]:
    pool, num_pages = parts.pool.pages, parts.core.limits.num_pages
    region = PoolRegion(pool.ctypes.data, parts.page_bytes, num_pages)
    state_pages = parts.core.shape.tables.state_pages
    hello = PairHello.of(
        start.instance, start.address, dict(parts.fingerprint), [region], state_pages
    )
    read_port = ReadPort(
        parts.cost,
        parts.page_bytes,
        config.engine.sim.link,
        pool,
        parts.pool_directory,
        wire_to,
        config.transfer.read_timeout_s,
    )
    paths = TransferPaths(
        SimLinks(read_port),
        SimOffers(parts.pool.name),
        (BACKEND,),
        ComparedBytes(ONE_RANK, lambda node: ()),
    )
    return both_sides(
        config.transfer,
        parts.core.shape.tables,
        hello,
        lambda: HostPageBytes(PagePool(pool.ctypes.data, pool.itemsize, num_pages, "cpu")),
        paths,
        reads,
        max_unconsumed_tokens=config.engine.scheduler.max_queued_tokens,
    )
