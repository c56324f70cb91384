"""The construction of an engine, part by part in the order of their dependencies."""

import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from common.config import EngineConfig, OffloadConfig
from common.errors import ConfigError
from common.logs import kv
from common.model_directory import model_directory
from common.requests.weights import WeightsId
from engine.adapters.adapters import AdapterManager
from engine.adapters.bank import AdapterBank
from engine.adapters.library import AdapterCache
from engine.adapters.loader import AdapterLoader
from engine.adapters.making import bank_of, load_all, shelf_of
from engine.batch.holding import PageHolding
from engine.batch.limits import RequestLimits
from engine.batch.request import Request
from engine.batch.table import SlotTable
from engine.cores import threads_at_hand
from engine.footprint import largest_forward, measure_footprint
from engine.grammar.grammar_verifier import SubprocessVerifier
from engine.grammar.guides import GrammarCache
from engine.kv_cache.kv import HostPool, KVPool
from engine.kv_cache.pages import PageAllocator
from engine.kv_cache.radix import PrefixCache
from engine.models import (
    LoadableModel,
    Model,
    constants,
    content,
    open_checkpoint,
    stored_of,
    tokenizer_hash,
)
from engine.models.checkpoint import Checkpoint, StoredTensor
from engine.models.linear import rounding_of
from engine.models.precision import choose_precision
from engine.offload.file_cache import FileCache
from engine.offload.file_threads import FileThreads
from engine.offload.host_cache import HostCache
from engine.offload.page_files import PageFiles
from engine.offload.page_records import version_of
from engine.offload.tiers import CacheTiers
from engine.processor import matrix_features
from engine.runner.copier import PageCopier
from engine.runner.cpu import use_cpu
from engine.runner.gpu import use_gpu
from engine.runner.graphs import CudaRecorder
from engine.runner.profiler import Profiler
from engine.runner.runner import ModelRunner
from engine.runner.stream import DeviceStream, open_stream
from engine.sampling.composition import SamplingFeatures, every_feature
from engine.scheduler.scheduler import Scheduler
from engine.sizing import (
    CUDA_CONTEXT_BYTES,
    EngineShape,
    free_bytes,
    host_pages_of,
    resolve_device,
    resolve_shape,
)
from engine.speculative.speculator import Speculator
from engine.update import WeightUpdater

PROGRESS_S = 1.0  # between two log lines about captured graphs

log = logging.getLogger(__name__)


class _Host(NamedTuple):
    """The pages in host memory: for retracted requests, and as a tier below the prefix cache."""

    pool: HostPool
    tiers: CacheTiers
    copier: PageCopier


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """The parts that a role and a loop are built on. constants: the constant part of the
    fingerprint."""

    shape: EngineShape
    model: Model
    pool: KVPool
    table: SlotTable
    pages: PageAllocator
    cache: PrefixCache
    stream: DeviceStream
    features: SamplingFeatures
    runner: ModelRunner
    limits: RequestLimits
    host_pool: HostPool
    tiers: CacheTiers
    copier: PageCopier
    adapters: AdapterManager
    loader: AdapterLoader
    guides: GrammarCache
    weights: WeightUpdater
    constants: dict[str, str]
    tokenizer_hash: str
    speculator: Speculator | None = None

    @property
    def fingerprint(self) -> dict[str, str]:
        """The values that must be equal on a peer, field by field, before one computes on the
        other's KV."""
        return {**self.constants, "weights": self.weights.id.hex()}

    def scheduler(
        self, config: EngineConfig, on_admit: Callable[[Request, PageHolding], None]
    ) -> Scheduler:
        """Create the scheduler of this engine; see Scheduler for `on_admit`."""
        spec = self.model.spec
        chunked = {"chunked_prefill_tokens": self.shape.chunk_tokens or -1}
        return Scheduler(
            config.scheduler.model_copy(update=chunked),
            eos_token_ids=spec.eos_token_ids,
            vocabulary_size=spec.vocabulary_size,
            table=self.table,
            pages=self.pages,
            cache=self.cache,
            tiers=self.tiers,
            on_admit=on_admit,
            speculator=self.speculator,
        )

    def profiler(self, config: EngineConfig, role: str, num_steps: Callable[[], int]) -> Profiler:
        """Create the profiler of this engine; see Profiler."""
        name, device = f"baton-{role}", self.model.device
        return Profiler(config.profile_dir, name, self.stream, device, num_steps)

    def equipped(self, config: EngineConfig) -> "Engine":
        """Return this engine with the host pages and the decode graphs of another role in place of
        its own.

        All other parts, including cached pages, are the same objects. The two engines must not be
        used at the same time, and this one must be idle. Host memory that is a tier is kept:
        retracted requests may use its pages, and the contents of the others are not lost.

        Args:
            config: as this engine's, except for those two.
        Raises:
            ConfigError: there is not enough memory for them.
        """
        device = self.shape.device
        shape, host = self.shape, _Host(self.host_pool, self.tiers, self.copier)
        if not shape.tier_pages:
            shape = replace(shape, host_pages=_affordable_host_pages(config, shape))
            host = _host(shape, self.pool, self.cache, self.pages, config.offload, None)
        try:
            runner = _runner(
                config,
                shape,
                self.model,
                self.pool,
                host.pool,
                self.table,
                self.features,
                self.adapters,
                self.stream,
            )
        except torch.OutOfMemoryError as error:
            raise ConfigError(f"there is no room for decode graphs on {device}") from error
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            if free < CUDA_CONTEXT_BYTES:
                raise ConfigError(
                    f"decode graphs leave {free >> 20} MiB of {device}, where "
                    f"{CUDA_CONTEXT_BYTES >> 20} MiB are needed beside them"
                )
        return replace(
            self,
            shape=shape,
            host_pool=host.pool,
            tiers=host.tiers,
            copier=host.copier,
            runner=runner,
        )

    def close(self) -> None:
        """End its threads, and those of its parts."""
        self.stream.close()
        self.guides.close()
        self.loader.close()
        self.copier.close()
        self.tiers.close()
        self.weights.close()


def build(config: EngineConfig) -> Engine:
    """Load the model, and size everything else by the remaining memory.

    Raises:
        ConfigError: the model is not supported, or does not fit.
    """
    device = resolve_device(config.device)
    if device.type == "cpu":
        use_cpu(config.threads or threads_at_hand(os.environ), config.cpu_kernels)
    else:
        use_gpu(device)  # in this thread, which launches kernels
    directory = model_directory(config.model, weights=True)
    servable = open_checkpoint(directory, config.model_backend, config.speculative)
    precision = choose_precision(config.dtype, device, Checkpoint(directory), matrix_features())
    named = _named(stored_of(servable, directory))
    model = _load(servable, device, precision.dtype, config)
    rounding = rounding_of(device, config.quantize, int8_stored=model.spec.int8_stored)
    bank = bank_of(config.lora, model, free_bytes(device, config.cache.memory_fraction))
    shape = _shape(config, model, bank)
    pool = KVPool(shape.layout, shape.num_pages, device)
    page_size, windows = shape.layout.page_size, shape.layout.windows
    state_pages = shape.layout.state_pages
    table = SlotTable(
        config.scheduler.num_slots, shape.context_length, page_size, windows, state_pages
    )
    pages = PageAllocator(shape.num_pages)
    cache = PrefixCache(page_size, pages, windows, state_pages, enabled=config.cache.prefix_cache)
    told = _constants(servable, shape, str(precision), rounding)
    version = None
    if config.offload.disk_dir is not None and shape.tier_pages:
        version = version_of(told, named.result())
    host = _host(shape, pool, cache, pages, config.offload, version)
    stream = open_stream(device)
    features = every_feature(table, model.spec.vocabulary_size, model.spec.eos_token_ids, device)
    adapters = AdapterManager(
        AdapterCache(config.lora.max_cpu_loras, config.lora.max_cpu_lora_bytes), bank, table
    )
    shelf = shelf_of(config.lora, model)
    load_all(config.lora, shelf, adapters.library)
    runner = _runner(config, shape, model, pool, host.pool, table, features, adapters, stream)
    log.info(
        "engine built %s",
        kv(
            device=str(device),
            computed=servable.computed,
            dtype=str(precision),
            reason=precision.because,
            kv=str(shape.layout.dtype).removeprefix("torch."),
            quantize=rounding,
            stored=model.spec.stored,
            pages=shape.num_pages,
            host_pages=shape.host_pages + shape.tier_pages,
            page_size=page_size,
            pool_mib=pool.num_bytes >> 20,
            chunk_tokens=shape.chunk_tokens,
            context=shape.context_length,
            threads=torch.get_num_threads(),
            adapters=len(adapters.library),
        ),
    )
    return Engine(
        shape=shape,
        model=model,
        pool=pool,
        table=table,
        pages=pages,
        cache=cache,
        stream=stream,
        features=features,
        runner=runner,
        host_pool=host.pool,
        tiers=host.tiers,
        copier=host.copier,
        adapters=adapters,
        loader=AdapterLoader(shelf, adapters.library),
        guides=_guides(directory, model),
        weights=WeightUpdater(config, directory, servable, model, named.result()),
        limits=RequestLimits(
            context_length=shape.context_length,
            vocabulary_size=model.spec.vocabulary_size,
            tables=shape.layout.tables,
            num_pages=shape.num_pages,
            generates=model.spec.generates,
            num_labels=model.spec.num_labels,
            image_token_side=model.spec.image_token_side,
        ),
        constants=told,
        tokenizer_hash=tokenizer_hash(directory),
        speculator=Speculator.of(config.speculative, config.scheduler.num_slots),
    )


def _named(stored: Mapping[str, StoredTensor]) -> Future[WeightsId]:
    """Compute the weights' id in parallel to loading, so that each file is read from the disk
    once."""
    worker = ThreadPoolExecutor(1, "weights")
    try:
        return worker.submit(content, stored)
    finally:
        worker.shutdown(wait=False)


def _constants(
    servable: LoadableModel, shape: EngineShape, dtype: str, rounding: str
) -> dict[str, str]:
    return {
        **constants(servable),
        "dtype": dtype,
        "quantize": rounding,
        "page_size": str(shape.layout.page_size),
        "kv_dtype": str(shape.layout.dtype).removeprefix("torch."),
        "kv_layout": shape.layout.describe(),
        "kv_token_bytes": str(shape.layout.token_bytes),
    }


def _guides(directory: Path, model: Model) -> GrammarCache:
    told = directory, model.spec.vocabulary_size, model.spec.eos_token_ids
    return GrammarCache(*told, SubprocessVerifier(*told))


def _affordable_host_pages(config: EngineConfig, shape: EngineShape) -> int:
    """Return the number of host pages. Raise ConfigError if the host does not have enough
    memory."""
    layout = shape.layout
    num_pages = host_pages_of(config.cache, layout, shape.device, shape.num_pages)
    wanted, left = num_pages * layout.page_bytes, free_bytes(torch.device("cpu"), 1.0)
    if wanted > left:
        raise ConfigError(
            f"engine.cache.swap_pages: {num_pages} pages take {wanted / 2**30:.1f} GiB, "
            f"{left / 2**30:.1f} GiB are left"
        )
    return num_pages


def _host(
    shape: EngineShape,
    pool: KVPool,
    cache: PrefixCache,
    pages: PageAllocator,
    config: OffloadConfig,
    version: bytes | None,
) -> _Host:
    """Create the host pages and the tiers.

    Args:
        version: of pages in files; None: there are no files.
    Raises:
        ConfigError: there is not enough memory, or the files cannot be created where
            configured.
    """
    num_pages, tables = shape.host_pages + shape.tier_pages, shape.layout.tables
    host_pool = HostPool(shape.layout, num_pages, shape.device)
    copier = PageCopier(pool, host_pool)
    index, store = None, None
    if version is not None and config.disk_dir is not None:
        memory = host_pool.tensor.numpy()
        files = PageFiles(config.disk_dir, memory, version=version, num_bytes=config.disk_bytes)
        index = FileCache(files.num_slots, tables.width, files.found())
        store = FileThreads(files, lambda: copier.tell())
    tiers = CacheTiers(
        HostCache(num_pages, index),
        enabled=shape.tier_pages > 0,
        cache=cache,
        pages=pages,
        tables=tables,
        copier=copier,
        store=store,
    )
    return _Host(host_pool, tiers, copier)


def _runner(
    config: EngineConfig,
    shape: EngineShape,
    model: Model,
    pool: KVPool,
    host_pool: HostPool,
    table: SlotTable,
    features: SamplingFeatures,
    adapters: AdapterManager,
    stream: DeviceStream,
) -> ModelRunner:
    """Create the runner, with everything prepared that would otherwise delay its first steps."""
    on_cuda = model.device.type == "cuda"
    recorder = CudaRecorder() if on_cuda and config.cuda_graphs else None
    runner = ModelRunner(model, pool, host_pool, table, features, adapters, stream, recorder)
    if on_cuda:
        prepare(runner, largest_forward(shape, config.scheduler.num_slots))
    return runner


def _load(
    servable: LoadableModel, device: torch.device, dtype: torch.dtype, config: EngineConfig
) -> Model:
    needed = servable.weight_bytes(device, dtype, config.quantize)
    free = free_bytes(device, config.cache.memory_fraction)
    if needed > free:
        raise ConfigError(
            f"{config.model}: the weights take {needed / 2**30:.2f} GiB, and {free / 2**30:.2f} "
            f"GiB of {device} may be used (engine.cache.memory_fraction "
            f"{config.cache.memory_fraction})"
        )
    return servable.load(device, dtype, config.quantize)


def _shape(config: EngineConfig, model: Model, bank: AdapterBank) -> EngineShape:
    fraction = config.cache.memory_fraction
    free = free_bytes(model.device, fraction)
    shape = resolve_shape(config, model.spec, dtype=model.dtype, free=free)
    if model.device.type == "cpu":
        return shape
    seeing = 0 if model.seeing is None else model.seeing.needed_bytes()
    footprint = measure_footprint(
        model, shape, bank, max_running=config.scheduler.num_slots, graphs=config.cuda_graphs
    )
    log.info(
        "memory beside weights and pages %s",
        kv(
            forward_mib=footprint.forward >> 20,
            graphs_mib=footprint.graphs >> 20,
            state_mib=footprint.state >> 20,
            images_mib=seeing >> 20,
        ),
    )
    free = free_bytes(model.device, fraction) - footprint.total - seeing
    measured = config.scheduler.model_copy(
        update={"chunked_prefill_tokens": shape.chunk_tokens or -1}
    )
    config = config.model_copy(update={"scheduler": measured})
    return resolve_shape(config, model.spec, dtype=model.dtype, free=free)


def prepare(runner: ModelRunner, num_tokens: int) -> None:
    """Prepare everything that would otherwise delay the first requests: graphs, kernels, memory.

    Args:
        num_tokens: see `largest_forward`.
    """
    sizes = runner.graph_sizes
    told = time.monotonic()
    for done, size in enumerate(sizes, start=1):
        runner.capture(size)
        if time.monotonic() - told > PROGRESS_S or done == len(sizes):
            told = time.monotonic()
            log.info("decode graphs captured %s", kv(done=done, of=len(sizes), rows=size))
    # Last, because a capture returns unused memory to the device.
    runner.rehearse(num_tokens)
