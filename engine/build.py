"""Construction of an engine: load the model (load.py), determine the sizes, assemble the parts."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch

from common.config import EngineConfig, SchedulerConfig
from common.errors import ConfigError
from common.logs import kv
from engine.adapters.adapters import AdapterBank, AdapterManager, adapter_directory, load_all
from engine.adapters.library import AdapterCache, AdapterLoader, AdapterSource
from engine.backend import TorchBackend
from engine.batch.graph_shapes import max_tokens
from engine.batch.holding import PageHolding
from engine.batch.request import Request
from engine.core import EngineCore, InputEncoder
from engine.footprint import largest_forward, measure_footprint
from engine.grammar.grammar_verifier import GrammarVerifier, SubprocessVerifier
from engine.grammar.guides import GrammarCache
from engine.kv_cache.kv import HostPool, KVPool
from engine.kv_cache.pages import PageAllocator
from engine.kv_cache.radix import PrefixCache
from engine.load import LoadedModel, load, usable_bytes
from engine.loop.rebalancing import ExpertBalancer
from engine.loop.step_clock import StepClock
from engine.loop.watchdog import end_process
from engine.memory_release import PageMemory, memory_of
from engine.models import Model
from engine.models.decoder import Decoder
from engine.models.vision.encoder_thread import EncoderThread
from engine.models.weights import placed_experts
from engine.offload.cache_tiers import CacheTiers
from engine.offload.file_tier import PageStore
from engine.offload.page_files import FileThreads
from engine.offload.page_records import version_of
from engine.profiler import Profiler
from engine.rank_files import FilesOfRanks, version_of_rank
from engine.rank_jobs import AdaptersOfRanks, CopierOfRanks, MemoryOfRanks, WeightsOfRanks
from engine.ranks import Share
from engine.ranks.messages import ReplaceHostPages, StartSteps, TransferJob
from engine.ranks.node_group import NodeGroup
from engine.ranks.processes import Followers
from engine.runner.forwards import Forwards
from engine.runner.graphs import CudaRecorder
from engine.runner.ranked import LeadingForwards, largest_step
from engine.runner.runner import ModelRunner, SplitRunner, make_runner
from engine.runner.staged import StagedForwards
from engine.runner.stream import DeviceStream
from engine.sampling.composition import every_feature
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.split_prefill import GroupLimits
from engine.sizing import (
    CUDA_CONTEXT_BYTES,
    EngineShape,
    free_bytes,
    host_pages_of,
    largest_page,
    part_of,
    releasable_memory,
    resolve_device,
    resolve_shape,
    whole_layout,
)
from engine.speculative import Speculator
from engine.update import WeightsInMemory, WeightUpdater

PROGRESS_S = 1.0  # seconds between two log lines about captured graphs
EQUIP_S = 60.0  # seconds for the allocation of host pages

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """The parts of an engine, for a role and its event loop."""

    core: EngineCore
    loaded: LoadedModel
    backend: TorchBackend
    runner: ModelRunner
    adapters: AdapterManager
    loader: AdapterLoader
    guides: GrammarCache
    weights: WeightUpdater
    group: NodeGroup | None = None  # data-parallel group in which this node shares experts
    balancer: ExpertBalancer | None = None  # moves experts between the ranks of this node (EPLB)

    @property
    def shape(self) -> EngineShape:
        return self.backend.shape

    @property
    def model(self) -> Model:
        return self.loaded.model

    @property
    def pool(self) -> KVPool:
        return self.backend.pool

    @property
    def page_bytes(self) -> int:
        return self.pool.page_bytes

    @property
    def pages(self) -> PageAllocator:
        return self.core.pages

    @property
    def cache(self) -> PrefixCache:
        return self.core.cache

    @property
    def tiers(self) -> CacheTiers | None:
        return self.core.tiers

    @property
    def encoder(self) -> InputEncoder | None:
        return self.core.encoder

    @property
    def follower_pids(self) -> tuple[int, ...]:
        followers = self.loaded.followers
        return () if followers is None else followers.pids

    def devices(self, config: EngineConfig) -> tuple[str, ...]:
        """Return the device of each rank, as named on the rank's host."""
        places = map(config.parallel.place, range(self.loaded.share.num_ranks))
        return tuple(str(resolve_device(config.device, place)) for place in places)

    def ask_followers(
        self,
        body: bytes,
        on_done: "Callable[[Future[Sequence[bytes]]], None] | None" = None,
    ) -> "Future[Sequence[bytes]]":
        """Make all other ranks do a part of hand-offs, see TransferJob and Followers.ask."""
        followers = self.loaded.followers
        assert followers is not None
        return followers.ask(TransferJob(followers.steps_done, body), on_done)

    @property
    def page_memory(self) -> PageMemory:
        """Return the memory of the pages of all ranks."""
        followers = self.loaded.followers
        if followers is None:
            return memory_of(self.pool, self.backend.host_pool)
        ranks_per_host = followers.parallel.ranks_per_host
        return MemoryOfRanks(
            memory_of(self.pool, self.backend.host_pool, ranks_per_host), followers
        )

    @property
    def fingerprint(self) -> dict[str, str]:
        """Values that must be equal on another node, by field, before one uses the KV of the
        other."""
        return {**self.loaded.fingerprint(self.shape), "weights": self.weights.id.hex()}

    def scheduler(
        self, config: EngineConfig, on_admit: Callable[[Request, PageHolding], None]
    ) -> Scheduler:
        return Scheduler(config.scheduler, self.core, on_admit)

    def split_runner(
        self, config: SchedulerConfig, scheduler: Scheduler, clock: StepClock
    ) -> SplitRunner:
        """Make a scheduler of this engine compute prompts in groups of layers (split prefill). The
        clock of its loop determines their sizes. Return the runner of its steps."""
        model, forwards = self.model, self.runner.forwards
        assert isinstance(model, Decoder) and isinstance(forwards, Forwards)
        limit_s = config.split_prefill_ms / 1000
        limits = GroupLimits(limit_s, len(model.layers), clock.prefill.token_s)
        scheduler.split_prefills(limits)
        return SplitRunner(self.runner, forwards, model.begin)

    def profiler(self, config: EngineConfig, role: str, num_steps: Callable[[], int]) -> Profiler:
        name, device = f"baton-{role}", self.model.device
        return Profiler(config.profile_dir, name, self.backend.stream, device, num_steps)

    def equipped(self, config: EngineConfig) -> "Engine":
        """Return this engine with the host pages and the CUDA graphs of another role instead of its
        own.

        All other parts, including cached pages, are the same objects. Use only one of the two
        engines at a time, and only while this one is idle. Host memory of an offload tier is kept,
        because its content must not be lost, and retracted requests may use its pages.

        Args:
            config: equal to this engine's, except for host pages and graphs.
        Raises:
            ConfigError: there is not enough memory.
        """
        core, backend, device = self.core, self.backend, self.shape.device
        if not self.shape.tier_pages:
            num_pages = _affordable_host_pages(config, self.shape, self.loaded.share)
            backend = _with_ranks(backend.with_host_pages(num_pages), self.loaded)
            core = core.with_host_pages(backend.shape)
        recorder = _recorder(config, device)
        try:
            runner = self.runner.with_host_pool(backend.host_pool, recorder)
            _prepare_runner(runner, config, self.shape)
        except torch.OutOfMemoryError as error:
            raise ConfigError(f"not enough memory for CUDA graphs on {device}") from error
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            if free < CUDA_CONTEXT_BYTES:
                raise ConfigError(
                    f"CUDA graphs leave {free >> 20} MiB free on {device}, and "
                    f"{CUDA_CONTEXT_BYTES >> 20} MiB are needed"
                )
        return replace(self, core=core, backend=backend, runner=runner)

    def equip_followers(self) -> None:
        """Make the other ranks allocate as many host pages as this rank, see `equipped`. No step
        may be in flight."""
        followers, num_pages = self.loaded.followers, self.backend.host_pool.num_pages
        if followers is not None and not self.shape.tier_pages:
            followers.ask(ReplaceHostPages(num_pages)).result(EQUIP_S)

    def close(self) -> None:
        """End the threads and processes of the engine and its parts, in order."""
        self.backend.stream.close()
        self.guides.close()
        self.loader.close()
        self.backend.copier.close()
        if self.tiers is not None:
            self.tiers.close()
        if self.core.encoder is not None:
            self.core.encoder.close()
        self.weights.close()
        if self.loaded.followers is not None:
            self.loaded.followers.close(in_order=True)
        if self.group is not None:
            self.group.close()


def build(
    config: EngineConfig,
    follower_program: str = "",
    relay: Sequence[str] = (),
    group: NodeGroup | None = None,
) -> Engine:
    """Load the model, and size everything else by the remaining memory.

    Args:
        follower_program: module that the other ranks run, if there are any.
        relay: the process that connects the ranks of other hosts, see Followers.
        group: data-parallel group of this node.
    Raises:
        ConfigError: the model is not supported, or is too large.
    """
    exchange = None if group is None else group.exchange
    loaded = load(config, follower_program, relay, exchange)
    try:
        memory = releasable_memory(config, loaded.model.device)
        backend = TorchBackend.open(plan(config, loaded), memory=memory)
        backend = _with_ranks(backend, loaded)
        files = _open_files(config, loaded, backend)
        ranks = _files_of_ranks(config, loaded, backend, files)
        core = make_core(config, loaded, backend, ranks or files)
        engine = assemble(config, loaded, core, backend)
        if ranks is not None:
            ranks.open()
        return engine if group is None else replace(engine, group=group)
    except BaseException:
        if loaded.followers is not None:
            loaded.followers.close()
        raise


def _with_ranks(backend: TorchBackend, loaded: LoadedModel) -> TorchBackend:
    """Return a backend that copies the pages of all ranks."""
    if loaded.followers is None:
        return backend
    return replace(backend, copier=CopierOfRanks(backend.copier, loaded.followers))


def pages_of(
    config: EngineConfig, model: Model, share: Share, num_pages: int, num_host_pages: int
) -> tuple[KVPool, HostPool]:
    """Allocate the pages of a follower.

    Raises:
        ConfigError: there is not enough memory.
    """
    layout = part_of(whole_layout(config, model.spec, model.dtype, model.device), share)
    return (
        KVPool(layout, num_pages, model.device, releasable_memory(config, model.device)),
        HostPool(layout, num_host_pages, model.device),
    )


def plan(config: EngineConfig, loaded: LoadedModel) -> EngineShape:
    """Determine the sizes of an engine on this machine. Memory for routed experts is allocated
    before the rest is measured.

    Raises:
        ConfigError: the model is too large, or has no experts although they are to be returned.
    """
    model, share, followers = loaded.model, loaded.share, loaded.followers
    free = usable_bytes(model.device, config)
    if followers is not None and (model.device.type == "cuda" or config.parallel.hosts > 1):
        free = min(free, followers.free_bytes)
    shape = resolve_shape(config, model.spec, dtype=model.dtype, free=free, share=share)
    if config.routed_experts.enabled:
        record_experts(config, model, shape)
    if model.device.type == "cpu":
        return shape
    if followers is not None:
        followers.measure(free)
    room = measured_room(config, model, loaded.bank, share, shape)
    if followers is not None:
        room = min(room, followers.measured())
    measured = config.scheduler.model_copy(
        update={"chunked_prefill_tokens": shape.chunk_tokens or -1}
    )
    config = config.model_copy(update={"scheduler": measured})
    return resolve_shape(config, model.spec, dtype=model.dtype, free=room, share=share)


def record_experts(config: EngineConfig, model: Model, shape: EngineShape) -> None:
    """Make the model record the experts of the tokens of each forward. Raise ConfigError if it has
    no experts."""
    num_slots = config.scheduler.num_slots
    num_drafts = num_slots * config.speculative.num_speculative_tokens
    assert isinstance(model, Decoder)
    largest = largest_forward(shape, num_slots) + num_drafts
    model.record_experts(max(largest, max_tokens(num_slots)))


def measured_room(
    config: EngineConfig, model: Model, bank: AdapterBank, share: Share, shape: EngineShape
) -> int:
    """Return the GPU bytes that remain for the pages of a rank after the memory of steps. All ranks
    measure at the same time.

    Args:
        shape: has the sizes of steps.
    """
    seeing = 0 if model.seeing is None else model.seeing.needed_bytes()
    footprint = measure_footprint(
        model,
        shape,
        bank,
        max_running=config.scheduler.num_slots,
        max_drafts=config.speculative.max_drafts,
        graphs=_has_graphs(config),
        stage=share.stage,
    )
    log.info(
        "memory in addition to weights and pages %s",
        kv(
            forward_mib=footprint.forward >> 20,
            graphs_mib=footprint.graphs >> 20,
            state_mib=footprint.state >> 20,
            images_mib=seeing >> 20,
        ),
    )
    memory = releasable_memory(config, model.device)
    rounding = 0 if memory is None else memory.driver.granularity
    return usable_bytes(model.device, config) - footprint.total - seeing - rounding


def _version_of_pages(loaded: LoadedModel, shape: EngineShape) -> bytes:
    return version_of(loaded.fingerprint(shape), loaded.weights_id.result())


def _open_files(
    config: EngineConfig, loaded: LoadedModel, backend: TorchBackend
) -> FileThreads | None:
    """Open this rank's files of the file tier, if it is configured.

    Raises:
        ConfigError: the files cannot be created in the configured place.
    """
    if config.offload.disk_dir is None or not backend.shape.tier_pages:
        return None
    share, version = loaded.share, _version_of_pages(loaded, backend.shape)
    num_bytes = config.offload.disk_bytes // share.num_ranks
    return backend.open_files(config.offload.disk_dir, version_of_rank(version, share), num_bytes)


def _files_of_ranks(
    config: EngineConfig, loaded: LoadedModel, backend: TorchBackend, own: FileThreads | None
) -> FilesOfRanks | None:
    """Return the files of all ranks, or None with one rank. They are not open yet."""
    if loaded.followers is None or own is None:
        return None
    return FilesOfRanks(
        own,
        loaded.followers,
        _version_of_pages(loaded, backend.shape),
        config.offload.disk_bytes // loaded.share.num_ranks,
        lambda: backend.copier.notify(),
    )


def make_core(
    config: EngineConfig,
    loaded: LoadedModel,
    backend: TorchBackend,
    store: PageStore | None = None,
) -> EngineCore:
    """Create the core over the pages of `backend`. `store`: files of the file tier."""
    shape = backend.shape
    return EngineCore.make(
        config,
        shape,
        loaded.limits(shape, config),
        backend.copier,
        store=store,
        speculator=Speculator.of(config.speculative, config.scheduler.num_slots),
    )


def assemble(
    config: EngineConfig,
    loaded: LoadedModel,
    core: EngineCore,
    backend: TorchBackend,
    verifier: GrammarVerifier | None = None,
) -> Engine:
    """Assemble an engine that is ready to run.

    Args:
        verifier: verifies grammars. None: start a process for it.
    """
    model, spec = loaded.model, loaded.model.spec
    of_tokens = loaded.directory, spec.vocabulary_size, spec.eos_token_ids
    library = AdapterCache(config.lora.max_cpu_loras, config.lora.max_cpu_lora_bytes)
    source: AdapterSource = adapter_directory(config.lora, model)
    adapters = AdapterManager(library, loaded.bank, core.table)
    features = every_feature(
        core.table, spec.vocabulary_size, spec.eos_token_ids, backend.shape.device
    )
    recorder = _recorder(config, model.device)
    pages, stream = (backend.pool, backend.host_pool), backend.stream
    runner = make_runner(model, *pages, core.table, features, adapters, stream, recorder)
    if loaded.followers is not None:
        runner = _leading(runner, config, loaded.followers, backend)
        source = AdaptersOfRanks(source, loaded.followers)
    load_all(config.lora, source, library)
    _prepare_runner(runner, config, backend.shape)
    _report(backend, adapters)
    weights = _updater(config, loaded)
    seeing = model.seeing
    encoder = None
    if seeing is not None:
        encoder = EncoderThread(seeing, backend.pool.tensor, spec.image_token_size, model.dtype)
    return Engine(
        replace(core, encoder=encoder),
        loaded,
        backend,
        runner,
        adapters,
        AdapterLoader(source, library),
        GrammarCache(*of_tokens, verifier or SubprocessVerifier(*of_tokens)),
        weights,
        balancer=_balancer(config, loaded, weights, backend.stream),
    )


def _updater(config: EngineConfig, loaded: LoadedModel) -> WeightUpdater:
    others = None if loaded.followers is None else WeightsOfRanks(loaded.followers)
    memory = WeightsInMemory(loaded.model, loaded.loadable, loaded.region)
    return WeightUpdater(config, loaded.directory, loaded.weights_id.result(), memory, others)


def _balancer(
    config: EngineConfig, loaded: LoadedModel, weights: WeightUpdater, stream: DeviceStream
) -> ExpertBalancer | None:
    """Return the balancer that moves the experts of the layers. The layers have counted only the
    warmup so far."""
    placement, model = loaded.share.placement, loaded.model
    if placement is None or not config.parallel.rebalance_steps:
        return None
    assert isinstance(model, Decoder)
    layers = placed_experts(model)
    return ExpertBalancer(layers, placement, weights, stream, config.parallel.rebalance_steps)


def _leading(
    runner: ModelRunner, config: EngineConfig, followers: Followers, backend: TorchBackend
) -> ModelRunner:
    """Return a runner that sends its steps to the followers, and start them."""
    shape, forwards = backend.shape, runner.forwards
    assert isinstance(forwards, Forwards)
    sizes = runner.builder.sizes(forwards.spec)
    num_tokens = largest_forward(shape, config.scheduler.num_slots)
    num_bytes = largest_step(
        num_tokens,
        shape.tables.num_tables,
        sizes.num_slots,
        sizes.max_pages,
        2 * shape.num_pages,  # all pages are swapped out, and others in
        forwards.spec.hidden_size if config.input_embeddings.enabled else 0,
    )

    def start(block_bytes: int) -> StartSteps:
        pages = shape.num_pages, shape.num_host_pages
        of_steps = sizes.num_slots, sizes.max_pages, sizes.max_drafts
        return StartSteps(*pages, *of_steps, num_tokens, block_bytes)

    ring = followers.start(start, num_bytes)
    followers.watch(end_process)
    stage = followers.share.stage
    own = forwards if stage is None else StagedForwards(forwards, stage, followers.sample_now)
    leading = LeadingForwards(own, followers, followers.ranks, ring)
    return ModelRunner(runner.builder, leading)


def _report(backend: TorchBackend, adapters: AdapterManager) -> None:
    shape = backend.shape
    log.info(
        "engine built %s",
        kv(
            kv=str(shape.layout.dtype).removeprefix("torch."),
            pages=shape.num_pages,
            host_pages=shape.num_host_pages,
            page_size=shape.layout.page_size,
            pool_mib=backend.pool.num_bytes >> 20,
            chunk_tokens=shape.chunk_tokens,
            context=shape.context_length,
            adapters=len(adapters.library),
        ),
    )


def _affordable_host_pages(config: EngineConfig, shape: EngineShape, share: Share) -> int:
    """Return the number of host pages. Raise ConfigError if the host has not enough memory for all
    its ranks."""
    layout = shape.layout
    num_pages = host_pages_of(config, layout, shape.device, shape.num_pages)
    wanted = num_pages * largest_page(shape.whole, share) * config.parallel.ranks_per_host
    left = free_bytes(torch.device("cpu"), 1.0)
    if wanted > left:
        raise ConfigError(
            f"engine.cache.swap_pages: {num_pages} pages take {wanted / 2**30:.1f} GiB, "
            f"{left / 2**30:.1f} GiB are free"
        )
    return num_pages


def _recorder(config: EngineConfig, device: torch.device) -> CudaRecorder | None:
    return CudaRecorder() if device.type == "cuda" and _has_graphs(config) else None


def _has_graphs(config: EngineConfig) -> bool:
    """Return whether decode steps use CUDA graphs. Steps with pipeline stages cannot, because they
    exchange tensors. FlashInfer cannot, because it plans each step on the host."""
    planned = config.attention_backend == "flashinfer"
    return config.cuda_graphs and config.parallel.pp == 1 and not planned


def _prepare_runner(runner: ModelRunner, config: EngineConfig, shape: EngineShape) -> None:
    if shape.device.type == "cuda":
        prepare(runner, largest_forward(shape, config.scheduler.num_slots))


def prepare(runner: ModelRunner, num_tokens: int) -> None:
    """Prepare everything that would delay the first requests: graphs, kernels, memory.

    Args:
        num_tokens: see `largest_forward`.
    """
    shapes = runner.graph_shapes
    reported = time.monotonic()
    for done, shape in enumerate(shapes, start=1):
        runner.capture(shape)
        if time.monotonic() - reported > PROGRESS_S or done == len(shapes):
            reported = time.monotonic()
            log.info("graphs captured %s", kv(done=done, of=len(shapes), tokens=shape.tokens))
    # Last, because a capture returns unused memory to the device.
    runner.rehearse(num_tokens)
