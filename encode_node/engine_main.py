"""The engine process of an encode node: the image encoder of a model, without its decoder.

Prefill nodes pair with it as with any producer, so it has their fingerprint and page size. Its
pages hold only embeddings.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from common.config import EncodeConfig, EngineConfig
from common.copy_map import ONE_RANK
from common.errors import ConfigError
from common.process.ipc import FrameSocket, PeerGone
from common.requests.namespace import WeightsId
from encode_node.exports import EmbeddingExports
from engine.kv_cache.kv import KVPool
from engine.kv_cache.layout import KVLayout
from engine.kv_cache.pages import PageAllocator
from engine.load import (
    OpenedModel,
    layout_fields,
    model_fields,
    named_weights,
    open_model,
    usable_bytes,
)
from engine.meters import image_gauges
from engine.models import tokenizer_hash
from engine.models.vision.encoder_thread import EncoderThread
from engine.models.vision.seeing import VisionInput, VisionTower
from engine.sizing import whole_layout
from kvtransfer import data_paths
from kvtransfer.backends.base import PagePool
from kvtransfer.frontend_messages import PairInput
from kvtransfer.pairing import PairHello
from kvtransfer.ports import ClosedEvent, GrantedEvent, NodeEvent, OpenedEvent
from kvtransfer.transfer.consumer import ReadMetrics
from kvtransfer.transfer.device_page_bytes import page_bytes_of
from kvtransfer.transfer.rank_paths import paths_of_rank
from kvtransfer.transfer.sides import both_sides
from kvtransfer.transfer.thread import TransferThread
from node.engine_process import Begin, EngineChannel, EngineStart, run_engine
from node.messages import (
    DescribeNode,
    Drained,
    DrainNode,
    EngineReady,
    EngineStats,
    NodeCall,
    NodeCallResult,
    ResumeNode,
    StartRole,
)

REPORT_INTERVAL_S = 0.5
LATE_S = 2 * REPORT_INTERVAL_S  # limit of the time between two turns
TRANSFER_END_S = 3.0


@dataclass(frozen=True, slots=True, eq=False)
class PlannedEncoder:
    """The image encoder of a model before it is loaded, and the shape of its node.

    Attributes:
        weight_bytes: size of its weights and of cached embeddings.
        usable_bytes: device memory that the node may use.
    """

    opened: OpenedModel
    vision: VisionInput
    layout: KVLayout
    weight_bytes: int
    num_pages: int
    usable_bytes: int

    @classmethod
    def of(cls, config: EncodeConfig) -> "PlannedEncoder":
        """Raises ConfigError if the model has no image encoder, or it does not fit."""
        engine = config.engine
        check(engine)
        opened = open_model(engine)
        vision = VisionInput.of(opened.directory)
        if vision is None:
            raise ConfigError(
                f"{engine.model}: the model has no image encoder, or its images are not supported. "
                "An encode node needs one, see docs/images.md"
            )
        device, dtype = opened.device, opened.precision.dtype
        weight_bytes, free = vision.weight_bytes(dtype), usable_bytes(device, engine)
        if weight_bytes + config.embedding_bytes > free:
            needed = weight_bytes + config.embedding_bytes
            raise ConfigError(
                f"{engine.model}: the image encoder takes {needed / 2**30:.2f} GiB, and "
                f"{free / 2**30:.2f} GiB of {device} may be used"
            )
        layout = whole_layout(engine, opened.loadable.spec, dtype, device)
        num_pages = config.embedding_bytes // layout.page_bytes
        if not num_pages:
            raise ConfigError(
                f"embedding_bytes: {config.embedding_bytes} are less than a page of "
                f"{layout.page_bytes} bytes"
            )
        return cls(opened, vision, layout, weight_bytes, num_pages, free)


@dataclass(frozen=True, slots=True, eq=False)
class LoadedEncoder:
    """The loaded image encoder of a model, and the pages for its embeddings."""

    opened: OpenedModel
    tower: VisionTower
    layout: KVLayout
    pool: KVPool
    weights: WeightsId
    fingerprint: dict[str, str]

    @classmethod
    def load(cls, config: EncodeConfig) -> "LoadedEncoder":
        """Raises ConfigError as `PlannedEncoder.of`."""
        plan = PlannedEncoder.of(config)
        opened, layout = plan.opened, plan.layout
        weights = named_weights(opened)
        tower = plan.vision.load(opened.device, opened.precision.dtype)
        fields = {**model_fields(config.engine, opened), **layout_fields(layout)}
        fingerprint = {**fields, "weights": weights.result().hex()}
        pool = KVPool(layout, plan.num_pages, opened.device)
        return cls(opened, tower, layout, pool, weights.result(), fingerprint)


def check(config: EngineConfig) -> None:
    """Raise ConfigError if a setting is not supported on encode nodes."""
    parallel = config.parallel
    settings = {
        "device: simulated": bool(config.simulated_gpu),
        f"parallel: {parallel.num_ranks} ranks": parallel.num_ranks > 1,
        f"parallel.dp: {parallel.dp}": parallel.dp > 1,
        "memory_saver": config.memory_saver,
    }
    for setting, used in settings.items():
        if used:
            raise ConfigError(f"engine.{setting} is not supported on encode nodes")


class TurnClock:
    """Records when the engine thread began its current turn. Any thread may use it."""

    def __init__(self) -> None:
        self._at = time.monotonic()

    def turn(self) -> None:
        self._at = time.monotonic()

    def late_s(self) -> float:
        """Return the seconds by which the next turn is overdue."""
        return max(0.0, time.monotonic() - self._at - LATE_S)


class EncodeEngine:
    """The loop of an encode node. Engine thread only."""

    def __init__(
        self,
        channel: EngineChannel,
        transfer: TransferThread,
        exports: EmbeddingExports,
        gauges: Callable[[], dict[str, float]],
        weights: WeightsId,
        clock: TurnClock,
    ) -> None:
        self._clock = clock
        self._channel = channel
        self._transfer = transfer
        self._exports = exports
        self._gauges = gauges
        self._weights = weights
        self._report_at = 0.0
        self._reported_drained = False

    def run(self) -> None:
        """Run until the frontend releases this process (PeerGone)."""
        while True:
            self._clock.turn()
            for event in self._transfer.take():
                self._handle(event)
            self._exports.poll()
            for message in self._channel.take():
                if isinstance(message, NodeCall):
                    self._channel.post(self._answer(message))
            if self._exports.draining and not self._exports.busy and not self._reported_drained:
                self._reported_drained = True
                self._channel.post(Drained())
            now = time.monotonic()
            if now >= self._report_at:
                self._report_at = now + REPORT_INTERVAL_S
                self._report()
            self._channel.wait(self._report_at - now)

    def _handle(self, event: NodeEvent) -> None:
        match event:
            case OpenedEvent():
                self._exports.opened(event)
            case GrantedEvent():
                self._exports.granted(event)
            case ClosedEvent():
                self._exports.closed(event)

    def _answer(self, call: NodeCall) -> NodeCallResult:
        match call.command:
            case DescribeNode():
                return NodeCallResult(call.number, description=self._exports.describe())
            case DrainNode() | ResumeNode():
                self._exports.draining = isinstance(call.command, DrainNode)
                self._reported_drained, self._report_at = False, 0.0
                return NodeCallResult(call.number)
        return NodeCallResult(call.number, error="an encode node does not support this command")

    def _report(self) -> None:
        counters = self._exports.counters().items()
        gauges = {
            **self._gauges(),
            **{f"total_{name}": float(value) for name, value in counters},
            "total_images/kept": float(self._exports.num_cached),
            "total_thread_cpu": time.thread_time(),
            "total_process_cpu": time.process_time(),
        }
        state = "draining" if self._exports.draining else "ready"
        self._channel.post(EngineStats(0, gauges, state, links=(), weights=self._weights))


def body(begin: Begin, first: StartRole) -> None:
    """Serve until the frontend releases this process."""
    start: EngineStart[EncodeConfig] = begin(first)
    loaded = LoadedEncoder.load(start.config)
    spec, pool, channel = loaded.opened.loadable.spec, loaded.pool, start.channel
    pages = PageAllocator(pool.num_pages)
    clock = TurnClock()
    transfer = _make_transfer(start, loaded, clock)
    encoder = EncoderThread(
        loaded.tower, pool.tensor, spec.image_token_size, loaded.opened.precision.dtype
    )
    encoder.notify = channel.wake
    exports = EmbeddingExports(
        encoder,
        loaded.tower,
        pages,
        pool.tensor,
        transfer,
        weights=loaded.weights,
        token_side=spec.image_token_side,
    )

    def gauges() -> dict[str, float]:
        held = {f"pages_{name}": float(number) for name, number in pages.by_holder().items()}
        return {**image_gauges(loaded.tower, encoder), **held}

    transfer.start()
    channel.post(
        EngineReady(
            model=start.config.engine.model,
            fingerprint=loaded.fingerprint,
            tokenizer_hash=tokenizer_hash(loaded.opened.directory),
            context_length=start.config.engine.context_length or spec.context_length,
            num_pages=pool.num_pages,
            page_size=loaded.layout.page_size,
        )
    )
    try:
        EncodeEngine(channel, transfer, exports, gauges, loaded.weights, clock).run()
    except PeerGone:
        transfer.stop(TRANSFER_END_S)
        exports.close()
        encoder.close()
        raise


def _make_transfer(
    start: EngineStart[EncodeConfig], loaded: LoadedEncoder, clock: TurnClock
) -> TransferThread:
    """Serve the pages, and return the transfer thread, which is not started yet."""
    config, layout, kv = start.config, loaded.layout, loaded.pool
    pool = PagePool(kv.base_address, kv.page_bytes, kv.num_pages, str(loaded.opened.device))
    tls = config.server.tls.cert is not None
    paths = paths_of_rank(
        0,
        ONE_RANK,
        pool,
        config.transfer,
        data_paths.backends(config.transfer, tls=tls),
        layout.pages_by_rank,
        start.instance,
    )
    hello = PairHello.of(
        start.instance, start.address, loaded.fingerprint, (pool.region,), layout.state_pages
    )
    frames: FrameSocket[PairInput] = FrameSocket(start.transfer_socket, PairInput)
    steps = config.engine.scheduler
    return TransferThread(
        frames,
        both_sides(
            config.transfer,
            layout.tables,
            hello,
            partial(page_bytes_of, pool),
            paths,
            ReadMetrics(),
            max_unconsumed_tokens=steps.max_queued_tokens,
        ),
        engine_late_s=clock.late_s,
        stall_s=steps.step_timeout_s,
        wake_engine=start.channel.wake,
    )


if __name__ == "__main__":
    run_engine({"encode": EncodeConfig}, body, "engine")
