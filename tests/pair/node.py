"""A prefill or decode node without its server process: engine, runtime and role of the product.

A fake router end takes the place of the engine's channel.
"""

import socket
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
    NODE_CONFIGS,
    CacheConfig,
    EngineConfig,
    HiddenStatesConfig,
    InputEmbeddingsConfig,
    LoraConfig,
    OffloadConfig,
    PrefixSharingConfig,
    RoutedExpertsConfig,
    SchedulerConfig,
    TransferConfig,
)
from common.request import NOT_PREDICTED, PredictionUsage
from common.requests.logprobs import TokenLogprobs
from common.requests.namespace import UNNAMED
from common.requests.sampling import GuidedDecoding, Prepared, SamplingParams
from decode_node import engine as decode_engine
from engine.adapters.adapters import bank_of
from engine.backend import TorchBackend
from engine.batch.batch import LaunchedBatch
from engine.batch.request import FinishReason
from engine.build import Engine, assemble, record_experts
from engine.core import EngineCore
from engine.grammar.compilers import prepared
from engine.grammar.grammar_verifier import VerifierLane
from engine.load import LoadedModel
from engine.loop.loop import EventLoop
from engine.models import Model, content, load, open_checkpoint, stored_of
from engine.models.refill import relocated
from engine.offload.page_records import version_of
from engine.runner.stream import DeviceStream
from engine.sizing import resolve_shape
from engine.speculative import Speculator
from kernels.cuda.virtual_memory import VirtualMemory
from node.engine_process import EngineStart
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
from node.runtime import NodeRuntime
from prefill_node import engine as prefill_engine
from tests.pair.wires import FrontEnd
from tests.support.engine.lifo_pages import LifoFreeList
from tests.support.hardware.devices import compute_as_a_node
from tests.support.network.loopback import LoopbackBackend

STREAM = 1  # of the only router


class AllPass:
    """A verifier that accepts every grammar."""

    def verify(self, guide: GuidedDecoding, lane: VerifierLane) -> Prepared:
        return prepared(guide)

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A checkpoint in memory that several engines may share."""

    directory: Path
    model: Model

    @classmethod
    def from_directory(cls, directory: Path, **options: Any) -> "Loaded":
        """Args: options: of `load`."""
        compute_as_a_node()
        return cls(directory, load(directory, torch.device("cpu"), torch.float32, **options))


@dataclass(frozen=True, slots=True)
class Size:
    """Settings that differ between the nodes of a rig. Names are those of the configuration.

    Attributes:
        tier_pages: host pages below the prefix cache, as in CoreShape.
        kv_dtype: CacheConfig.dtype.
        started_with: directory of other weights of the rig's model.
        memory: memory of pages and weights instead of host memory. Needs a model of its own.
    """

    num_pages: int = 64
    max_running_requests: int = 8
    max_queued_requests: int = 64
    swap_pages: int = -1
    tier_pages: int = 0
    disk_dir: Path | None = None
    prefix_cache: bool = True
    kv_dtype: str = "auto"
    lora: LoraConfig = field(default_factory=LoraConfig)
    weights_dir: Path | None = None
    started_with: Path | None = None
    speculator: Speculator | None = None
    hidden_states: HiddenStatesConfig = field(
        default_factory=lambda: HiddenStatesConfig(enabled=True)
    )
    routed_experts: RoutedExpertsConfig = field(default_factory=RoutedExpertsConfig)
    input_embeddings: bool = False
    memory: VirtualMemory | None = None


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
    """A request of the router, and the reports of the node about it.

    Attributes:
        of_spec: fields of its RequestSpec that a test has set.
        migrates: from another node.
    """

    number: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    of_spec: dict[str, Any]
    tokens: list[int] = field(default_factory=list)
    ended: RequestEnded | None = None
    cached_tokens: int | None = None  # None: not reported yet
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    ticket: int = 0
    migrates: bool = False
    predicted: PredictionUsage = NOT_PREDICTED

    @property
    def reason(self) -> FinishReason | None:
        return FinishReason(self.ended.reason) if self.ended else None


_read = msgspec.msgpack.Decoder(EngineMessage).decode


class RouterEnd:
    """The channel of a node's engine thread. Checks that the end of each request is reported
    once, and last."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self.woken = threading.Event()  # since the node's last turn
        self.inbox: deque[FrontMessage] = deque()
        self.asked: dict[int, Asked] = {}
        self.answers: list[NodeCallResult] = []
        self.pooled: list[PoolingDone] = []
        # quarantined requests that have begun, by start time. 0: the request has ended
        self.trials: list[int] = []
        self.drained = False
        self.rested = False  # times that the event loop had no work

    def take(self) -> Sequence[FrontMessage]:
        return [self.inbox.popleft() for _ in range(len(self.inbox))]

    def post(self, message: EngineMessage) -> None:
        match _read(msgspec.msgpack.encode(message)):  # as after a read from a socket
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
        """Record that the node has no work. The rig sleeps for all nodes at once."""
        self.rested = True

    def wake(self) -> None:
        """Record that another thread has input for the engine thread."""
        self.woken.set()
        self._wake()

    def _note(self, step: StepTokens) -> None:
        assert step.stream == STREAM
        numbers = np.frombuffer(step.requests, np.uint64).tolist()
        tokens = np.frombuffer(step.tokens, np.uint32).tolist()
        for number, cached_tokens in step.begun:
            if self.asked[number].cached_tokens is None:  # the first report is used
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
            begun = asked.cached_tokens is not None or asked.migrates
            assert begun, "a token before the report of cached tokens"
            self.asked[number].tokens.append(token)
        for ended in step.ended:
            assert self.asked[ended.request].ended is None, "a request ended twice"
            self.asked[ended.request].ended = ended


class TurnCounter:
    """Counts the turns of a transfer thread."""

    def __init__(self) -> None:
        self._heard = threading.Condition()
        self._num_turns = 0

    def turn(self) -> float:
        """Count a turn. Called on the transfer thread, after it has read its input."""
        with self._heard:
            self._num_turns += 1
            self._heard.notify_all()
        return 0.0  # the engine is never considered late

    def wait(self, wake: Callable[[], None], timeout_s: float) -> None:
        """Wait until the thread, which `wake` wakes, has handled all present input."""
        with self._heard:
            # The turn in progress may have read its input before. The results of the next turn are
            # sent when the turn after it begins.
            for _ in range(3):
                wake()
                assert self._heard.wait(timeout_s)


class Node:
    """A node. `step` runs one turn of its event loop, then the self-check."""

    def __init__(
        self, engine: Engine, runtime: NodeRuntime, role: Any, front: FrontEnd, config: EngineConfig
    ) -> None:
        self.engine = engine
        self.front = front
        self.transfer = runtime.transfer
        self.role = role
        self.router: RouterEnd = runtime.channel
        self.control = runtime.control
        self.in_flight: LaunchedBatch | None = None
        overlap = config.scheduler.overlap_schedule
        steps = runtime.steps(role, engine, config) or (role, engine.runner)
        self.clock = runtime.clock
        self._loop = EventLoop(*steps, overlap=overlap, clock=self.clock)
        self._turns = TurnCounter()
        # Never considered late: the test gives the turns.
        self.transfer._engine_late_s = self._turns.turn

    def step(self) -> bool:
        """Run one turn. Return False if there was nothing to compute."""
        self.router.rested = False
        self.router.woken.clear()
        self.in_flight = self._loop.step(self.in_flight)
        rested = self.router.rested
        self.role.idle()
        self.role.check_leaks()
        return not rested

    def catch_up(self, timeout_s: float) -> None:
        """Wait until the transfer thread has handled all input that is there now."""
        self._turns.wait(self.transfer._wake_up.wake, timeout_s)

    def queue(self, name: str) -> int:
        return int(self.role.queues()[name])

    def count(self, name: str) -> int:
        return int(self.role.counters()[name])

    def drafts(self) -> tuple[int, int]:
        """Return the draft tokens that were accepted and rejected."""
        return self.count("draft_tokens/accepted"), self.count("draft_tokens/rejected")

    def pages(self, holder: str) -> int:
        return self.engine.pages.by_holder()[holder]

    @property
    def holds_nothing(self) -> bool:
        """Return whether every page is free or cached, and no work is left."""
        held = self.engine.pages.by_holder()
        in_use = held["request"] + held["step"] + held["read"] + held["publication"]
        in_use += held["copy"]
        return not (self.router.inbox or self.role.busy or self.in_flight or in_use)

    def check_at_rest(self) -> None:
        engine, held = self.engine, self.engine.pages.by_holder()
        assert self.holds_nothing, self.describe()
        assert held["free"] + held["cache"] == engine.pages.num_pages
        assert engine.pages.num_evictable == held["cache"]
        assert engine.core.table.num_free == engine.core.table.num_slots
        scheduler = self.role.scheduler
        assert scheduler.num_host_pages_used == 0
        assert (scheduler.kept.slots, scheduler.kept.pages) == (0, 0)
        assert not any(self.role.queues().values())
        self.role.idle()

    def describe(self) -> str:
        return f"{self.front.address}: {self.role.queues()} {self.engine.pages.by_holder()}"


def make_node(
    common: Common,
    role: str,
    instance: int,
    size: Size,
    front: FrontEnd,
    transfer_socket: socket.socket,
    fields: dict[str, Any],
) -> Node:
    """fields: of the role's configuration."""
    engine, engine_config = _engine(common, size)
    config = NODE_CONFIGS[role](
        engine=engine_config, transfer=common.transfer, prefix_sharing=common.sharing, **fields
    )
    channel = RouterEnd(common.wake)
    start = EngineStart(role, config, instance, front.address, channel, transfer_socket)
    backends = {common.backend.name: common.backend}
    runtime = NodeRuntime.of(engine, start, lambda role: None, backends)
    engine.guides.notify = engine.loader.notify = engine.backend.copier.notify = channel.wake
    module = prefill_engine if role == "prefill" else decode_engine
    made = module.make_role(engine, runtime, config)
    return Node(engine, runtime, made, front, engine_config)


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
            swap_pages=size.swap_pages,
            prefix_cache=size.prefix_cache,
            dtype=size.kv_dtype,
        ),
        offload=OffloadConfig()
        if size.disk_dir is None
        else OffloadConfig(cpu_bytes=1, disk_dir=size.disk_dir, disk_bytes=1 << 24),
        scheduler=SchedulerConfig(
            max_running_requests=size.max_running_requests,
            max_queued_requests=size.max_queued_requests,
            **common.scheduler,
        ),
        lora=size.lora,
        weights_dir=size.weights_dir,
        hidden_states=size.hidden_states,
        routed_experts=size.routed_experts,
        input_embeddings=InputEmbeddingsConfig(enabled=size.input_embeddings),
    )
    loaded = _loaded(common, config, directory, size.memory)
    shape = resolve_shape(config, loaded.model.spec, dtype=loaded.model.dtype, free=1 << 40)
    shape = replace(shape, tier_pages=size.tier_pages)
    if config.routed_experts.enabled:
        record_experts(config, loaded.model, shape)
    backend = TorchBackend.open(shape, common.make_stream(), size.memory)
    backend.pool.tensor.fill_(0xFF)  # NaN: reads of pages that were never written fail
    store = None
    if size.disk_dir is not None:
        version = version_of({}, _content(common.loaded.directory))
        store = backend.open_files(size.disk_dir, version, config.offload.disk_bytes)
    core = EngineCore.make(
        config,
        shape,
        loaded.limits(shape, config),
        backend.copier,
        store=store,
        speculator=size.speculator,
        free_list=LifoFreeList,
    )
    return assemble(config, loaded, core, backend, AllPass()), config


def _loaded(
    common: Common, config: EngineConfig, directory: Path, memory: VirtualMemory | None
) -> LoadedModel:
    model, region = common.loaded.model, None
    if common.own_models:
        model = Loaded.from_directory(directory).model
    if memory is not None:
        assert common.own_models
        region = relocated(open_checkpoint(directory).tensors(model), memory)
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
        region=region,
    )


def _content(directory: Path) -> bytes:
    return content(stored_of(open_checkpoint(directory), directory))
