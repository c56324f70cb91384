"""A prefill or decode node without its front: engine, role and transfer thread of the product, and
a router's end in place of the engine's channel."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from common.config import (
    CacheConfig,
    DecodeConfig,
    EngineConfig,
    LoraConfig,
    OffloadConfig,
    PrefillConfig,
    PrefixSharingConfig,
    SchedulerConfig,
    TransferConfig,
)
from common.process.ipc import FrameSocket
from common.requests.images import Image
from common.requests.logprobs import NOTHING, PredictionUsage, TokenLogprobs
from common.requests.namespace import UNNAMED
from common.requests.sampling import GuidedDecoding, Prepared, SamplingParams
from decode_node import engine as decode_engine
from engine.adapters.adapters import bank_of
from engine.backend import TorchBackend
from engine.batch.batch import LaunchedBatch
from engine.batch.request import FinishReason
from engine.build import Engine, LoadedModel, assemble
from engine.core import EngineCore
from engine.grammar.compilers import prepared
from engine.grammar.grammar_verifier import GrammarWorker
from engine.kv_cache.cache_events import CacheEvents
from engine.loop.loop import EventLoop
from engine.memory_release import MemoryOccupation
from engine.models import Model, content, load, open_checkpoint, stored_of
from engine.offload.file_cache import version_of
from engine.runner.stream import DeviceStream
from engine.sizing import resolve_shape
from engine.speculative import Speculator
from kvtransfer.backends.base import PagePool, PageProducer
from kvtransfer.backends.loopback import LoopbackBackend, LoopbackFaults
from kvtransfer.front_messages import PairInput
from kvtransfer.pairing import PROTOCOL_VERSION, PairHello, PoolRegion
from kvtransfer.transfer.publisher import MAX_TOKENS
from kvtransfer.transfer.reader import ReadMetrics
from kvtransfer.transfer.sides import both_sides
from kvtransfer.transfer.thread import TransferThread
from node.control.engine_control import EngineControl
from node.control.operations import EngineOperations
from node.messages import (
    Drained,
    EngineMessage,
    FrontMessage,
    NodeCallResult,
    PoolingDone,
    QuarantineStarted,
    RequestEnded,
    StepTokens,
)
from node.sharing.prefixes import PrefixSharing
from node.sharing.weights import WeightSharing
from prefill_node import engine as prefill_engine
from tests.support.pair_wires import FrontEnd

STREAM = 1  # of the only router


class AllPass:
    """A verifier that accepts every grammar. These tests have small ones."""

    def prove(self, guide: GuidedDecoding, lane: GrammarWorker) -> Prepared:
        return prepared(guide)

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A checkpoint in memory; any number of engines may share it."""

    directory: Path
    model: Model

    @classmethod
    def from_directory(cls, directory: Path) -> "Loaded":
        return cls(directory, load(directory, torch.device("cpu"), torch.float32))


@dataclass(frozen=True, slots=True)
class Size:
    """Settings that differ between the nodes of a rig."""

    num_pages: int = 64
    num_slots: int = 8
    host_pages: int = -1
    tier_pages: int = 0  # of host memory, below the prefix cache
    file_dir: Path | None = None  # of files below that
    file_bytes: int = 1 << 24
    prefix_cache: bool = True
    max_waiting: int = 64
    kept_in: str = "auto"  # CacheConfig.dtype
    lora: LoraConfig = field(default_factory=LoraConfig)
    weights_directory: Path | None = None
    started_with: Path | None = None  # other weights of the rig's model
    speculator: Speculator | None = None


@dataclass(frozen=True, slots=True)
class Common:
    """Settings that all nodes of a rig share. scheduler: fields of SchedulerConfig."""

    loaded: Loaded
    page_size: int
    context_length: int
    scheduler: dict[str, Any]
    transfer: TransferConfig
    make_stream: Callable[[], DeviceStream]
    backend: LoopbackBackend
    wake: Callable[[], None]
    sharing: PrefixSharingConfig
    own_models: bool = False  # of each node, of the same weights


@dataclass(eq=False)
class Asked:
    """A request of the router, and what it has been told about it."""

    number: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    tokens: list[int] = field(default_factory=list)
    ended: RequestEnded | None = None
    cached_tokens: int | None = None  # None: not told yet
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    adapter: bytes = b""
    images: tuple[Image, ...] = ()
    ticket: int = 0
    moves: bool = False  # it runs elsewhere, and is to come here
    predicted: PredictionUsage = NOTHING

    @property
    def reason(self) -> FinishReason | None:
        return FinishReason(self.ended.reason) if self.ended else None


_read = msgspec.msgpack.Decoder(EngineMessage).decode


class RouterEnd:
    """The channel of a node's engine thread. Checks that each request ends once, and last."""

    def __init__(self) -> None:
        self.inbox: deque[FrontMessage] = deque()
        self.asked: dict[int, Asked] = {}
        self.answers: list[NodeCallResult] = []
        self.pooled: list[PoolingDone] = []
        self.trials: list[int] = []  # numbers of requests, as they began; 0: none any more
        self.drained = False
        self.rested = False  # the event loop had nothing to do

    def take(self) -> Sequence[FrontMessage]:
        return [self.inbox.popleft() for _ in range(len(self.inbox))]

    def post(self, message: EngineMessage) -> None:
        match _read(msgspec.msgpack.encode(message)):  # as it is on the other side of a socket
            case StepTokens() as said:
                self._note(said)
            case QuarantineStarted() as said:
                self.trials.append(said.request)
            case Drained():
                self.drained = True
            case NodeCallResult() as said:
                self.answers.append(said)
            case PoolingDone() as said:
                self.pooled.append(said)

    def wait(self, timeout_s: float) -> None:
        """The rig sleeps, for all nodes at once."""
        self.rested = True

    def _note(self, step: StepTokens) -> None:
        assert step.stream == STREAM
        numbers = np.frombuffer(step.requests, np.uint64).tolist()
        tokens = np.frombuffer(step.tokens, np.uint32).tolist()
        for number, cached_tokens in step.begun:
            if self.asked[number].cached_tokens is None:  # the first report counts
                self.asked[number].cached_tokens = cached_tokens
        for number, logprobs in step.logprobs:
            self.asked[number].logprobs += logprobs.tokens()
        for number, logprobs in step.prompt_logprobs:
            self.asked[number].prompt_logprobs = logprobs.tokens()
        for number, predicted in step.predicted:
            self.asked[number].predicted += predicted
        for number, token in zip(numbers, tokens, strict=True):
            asked = self.asked[number]
            assert asked.ended is None, "a token after the end"
            begun = asked.cached_tokens is not None or asked.moves
            assert begun, "a token, and nothing has begun"
            self.asked[number].tokens.append(token)
        for ended in step.ended:
            assert self.asked[ended.request].ended is None, "a request ended twice"
            self.asked[ended.request].ended = ended


class News:
    """A flag that is set once the transfer thread has sent the engine thread something since its
    last turn."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._told = threading.Event()
        self._wake = wake

    def __bool__(self) -> bool:
        return self._told.is_set()

    def tell(self) -> None:
        self._told.set()
        self._wake()

    def forget(self) -> None:
        self._told.clear()


class Ears:
    """Counts the turns of a transfer thread."""

    def __init__(self) -> None:
        self._heard = threading.Condition()
        self._num_turns = 0

    def turn(self) -> float:
        """On the transfer thread, in each turn between its input and what comes of that."""
        with self._heard:
            self._num_turns += 1
            self._heard.notify_all()
        return 0.0  # the engine is never late

    def wait(self, wake: Callable[[], None], timeout_s: float) -> None:
        """Until the thread, which `wake` wakes, has dealt with all that there is for it now."""
        with self._heard:
            # The turn under way may have looked before; what comes of the next one's input is done
            # when the one after it has looked.
            for _ in range(3):
                wake()
                assert self._heard.wait(timeout_s)


class Node:
    """`step` gives the event loop one turn and then checks the books."""

    def __init__(
        self,
        engine: Engine,
        front: FrontEnd,
        transfer: TransferThread[Any, Any],
        role: Any,
        router: RouterEnd,
        desk: EngineControl,
        news: News,
        ears: Ears,
        *,
        overlap: bool,
    ) -> None:
        self.engine = engine
        self.front = front
        self.transfer = transfer
        self.role = role
        self.router = router
        self.desk = desk
        self.news = news
        self._ears = ears
        self.in_flight: LaunchedBatch | None = None
        self._loop = EventLoop(role, engine.runner, overlap=overlap)

    def step(self) -> bool:
        """False if there was nothing to compute."""
        self.router.rested = False
        self.news.forget()
        self.in_flight = self._loop.step(self.in_flight)
        rested = self.router.rested
        self.role.idle()
        self.role.check_leaks()
        return not rested

    def catch_up(self, timeout_s: float) -> None:
        """Until the transfer thread has dealt with all that there is for it now."""
        self._ears.wait(self.transfer._wake_up.wake, timeout_s)

    def queue(self, name: str) -> int:
        return int(self.role.queues()[name])

    def count(self, name: str) -> int:
        return int(self.role.counters()[name])

    def pages(self, holder: str) -> int:
        return self.engine.pages.by_holder()[holder]

    @property
    def holds_nothing(self) -> bool:
        """Every page is free or cached, and nothing is under way."""
        held = self.engine.pages.by_holder()
        in_use = held["request"] + held["step"] + held["read"] + held["publication"]
        in_use += held["copy"]
        return not (self.router.inbox or self.role.busy or self.in_flight or in_use)

    def check_at_rest(self) -> None:
        engine, held = self.engine, self.engine.pages.by_holder()
        assert self.holds_nothing, self.describe()
        assert held["free"] + held["cache"] == engine.pages.num_pages
        assert engine.pages.num_evictable == held["cache"]
        assert engine.table.num_free == engine.table.num_slots
        assert self.role.scheduler.num_host_pages_used == 0
        assert not any(self.role.queues().values())
        self.role.idle()

    def describe(self) -> str:
        return f"{self.front.address}: {self.role.queues()} {self.engine.pages.by_holder()}"


@dataclass(frozen=True, slots=True, eq=False)
class Runtime:
    """The parts of an engine that a role is assembled from. See RoleRuntime."""

    instance: int
    channel: RouterEnd
    control: EngineControl
    sharing: PrefixSharing
    port: WeightSharing


def prefill_node(
    common: Common, instance: int, size: Size, front: FrontEnd, frames: FrameSocket[PairInput]
) -> tuple[Node, LoopbackFaults]:
    """The node, and the faults of copies from it."""
    engine, config = _engine(common, size)
    owner = common.backend.serve(_pool(engine), instance)
    hello = _hello(engine, instance, front.address)
    news, ears = News(common.wake), Ears()
    transfer = _transfer(common, engine, hello, owner, frames, news, ears)
    router, weights = RouterEnd(), _weights(instance, engine, transfer, news)
    desk = _desk(router, engine, config, weights)
    sharing = _sharing(common, instance, engine, weights)
    runtime = Runtime(instance, router, desk, sharing, weights)
    role = prefill_engine.make_role(engine, runtime, PrefillConfig(engine=config))
    engine.guides.tell = engine.loader.tell = engine.copier.tell = news.tell
    overlap = config.scheduler.overlap_schedule
    node = Node(engine, front, transfer, role, router, desk, news, ears, overlap=overlap)
    return node, owner.faults


def decode_node(
    common: Common,
    instance: int,
    size: Size,
    front: FrontEnd,
    frames: FrameSocket[PairInput],
    fields: dict[str, Any],
) -> Node:
    """fields: of DecodeConfig."""
    engine, engine_config = _engine(common, size)
    config = DecodeConfig(
        engine=engine_config, transfer=common.transfer, prefix_sharing=common.sharing, **fields
    )
    owner = common.backend.serve(_pool(engine), instance)
    hello = _hello(engine, instance, front.address)
    news, ears = News(common.wake), Ears()
    transfer = _transfer(common, engine, hello, owner, frames, news, ears)
    router, weights = RouterEnd(), _weights(instance, engine, transfer, news)
    desk = _desk(router, engine, engine_config, weights)
    sharing = _sharing(common, instance, engine, weights)
    runtime = Runtime(instance, router, desk, sharing, weights)
    role = decode_engine.make_role(engine, runtime, config)
    engine.guides.tell = engine.loader.tell = engine.copier.tell = news.tell
    overlap = engine_config.scheduler.overlap_schedule
    return Node(engine, front, transfer, role, router, desk, news, ears, overlap=overlap)


def _transfer(
    common: Common,
    engine: Engine,
    hello: PairHello,
    owner: PageProducer,
    frames: FrameSocket[PairInput],
    news: News,
    ears: Ears,
) -> TransferThread[Any, Any]:
    sides = both_sides(
        common.transfer,
        engine.shape.layout.tables,
        hello,
        _pool(engine),
        {common.backend.name: common.backend},
        {common.backend.name: owner},
        ReadMetrics(engine.pool.page_bytes),
        max_untaken_tokens=MAX_TOKENS,
    )
    return TransferThread(frames, sides, engine_late_s=ears.turn, wake_engine=news.tell)


def _weights(
    instance: int, engine: Engine, transfer: TransferThread[Any, Any], news: News
) -> WeightSharing:
    return WeightSharing(
        engine.weights,
        instance=instance,
        cache=engine.cache,
        pages=engine.pages,
        pool=engine.pool.tensor,
        port=transfer,
        tell=news.tell,
    )


def _sharing(
    common: Common, instance: int, engine: Engine, weights: WeightSharing
) -> PrefixSharing:
    return PrefixSharing(
        common.sharing,
        instance=instance,
        page_bytes=engine.pool.page_bytes,
        cache=engine.cache,
        pages=engine.pages,
        tiers=engine.tiers,
        tables=engine.shape.layout.tables,
        weights=weights,
    )


def _engine(common: Common, size: Size) -> tuple[Engine, EngineConfig]:
    """Assemble an engine over a loaded model, with pages of NaN that are reused at once."""
    directory = size.started_with or common.loaded.directory
    config = EngineConfig(
        model=str(common.loaded.directory),
        device="cpu",
        context_length=common.context_length,
        cache=CacheConfig(
            page_size=common.page_size,
            num_pages=size.num_pages,
            swap_pages=size.host_pages,
            prefix_cache=size.prefix_cache,
            dtype=size.kept_in,
        ),
        offload=OffloadConfig()
        if size.file_dir is None
        else OffloadConfig(cpu_bytes=1, disk_dir=size.file_dir, disk_bytes=size.file_bytes),
        scheduler=SchedulerConfig(
            max_running_requests=size.num_slots,
            max_queued_requests=size.max_waiting,
            **common.scheduler,
        ),
        lora=size.lora,
        weights_dir=size.weights_directory,
    )
    loaded = _loaded(common, config, directory)
    shape = resolve_shape(config, loaded.model.spec, dtype=loaded.model.dtype, free=1 << 40)
    shape = replace(shape, tier_pages=size.tier_pages)
    backend = TorchBackend.open(shape, common.make_stream())
    backend.pool.tensor.fill_(0xFF)  # NaN: reads of pages that were never written fail
    store = None
    if size.file_dir is not None:
        version = version_of({}, _content(common.loaded.directory))
        store = backend.open_files(config.offload, version)
    core = EngineCore.make(
        config,
        shape,
        loaded.limits(shape),
        backend.copier,
        store=store,
        speculator=size.speculator,
        lifo=True,
    )
    return assemble(config, loaded, core, backend, AllPass()), config


def _loaded(common: Common, config: EngineConfig, directory: Path) -> LoadedModel:
    model = common.loaded.model
    if common.own_models:
        model = Loaded.from_directory(directory).model
    weights_id: Future[bytes] = Future()
    weights_id.set_result(UNNAMED if config.weights_dir is None else _content(directory))
    return LoadedModel(
        directory,
        open_checkpoint(directory),
        model,
        {"model": str(common.loaded.directory)},
        "",
        weights_id,
        bank_of(config.lora, model, 1 << 40),
    )


def _content(directory: Path) -> bytes:
    return content(stored_of(open_checkpoint(directory), directory))


def _pool(engine: Engine) -> PagePool:
    pool = engine.pool
    return PagePool(pool.base_address, pool.page_bytes, pool.num_pages, "cpu")


def _hello(engine: Engine, instance: int, address: str) -> PairHello:
    pool = engine.pool
    return PairHello(
        instance=instance,
        protocol_version=PROTOCOL_VERSION,
        fingerprint=engine.fingerprint,
        paths=(),
        regions=(PoolRegion(pool.base_address, pool.page_bytes, pool.num_pages),),
        address=address,
    )


def _desk(
    router: RouterEnd, engine: Engine, config: EngineConfig, weights: WeightSharing
) -> EngineControl:
    pools = (engine.pool.tensor, engine.host_pool.tensor)
    memory = MemoryOccupation(engine.weights, engine.pages, pools, "", lambda: None)
    return EngineControl(
        router,
        pages_by_holder=engine.pages.by_holder,
        steps_finished=lambda: 0,
        cache=CacheEvents(engine.cache),
        adapters=engine.loader,
        operations=EngineOperations(
            engine.weights, weights, memory, engine.profiler(config, "test", lambda: 0)
        ),
    )
