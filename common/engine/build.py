"""Builds an engine, part after part, in the order in which they need each other."""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from common.config import EngineConfig
from common.cores import threads_at_hand
from common.engine.adapters.adapters import Adapters
from common.engine.adapters.bank import AdapterBank
from common.engine.adapters.library import Library
from common.engine.adapters.loader import AdapterLoader
from common.engine.adapters.making import bank_of, load_all, shelf_of
from common.engine.features.composition import every_feature
from common.engine.features.guides import Guides
from common.engine.features.prover import Beside
from common.engine.footprint import largest_forward, measure_footprint
from common.engine.memory.host_cache import HostCache
from common.engine.memory.kv import HostPool, KVPool
from common.engine.memory.pages import PageAllocator
from common.engine.memory.radix import RadixCache
from common.engine.memory.tiers import Tiers
from common.engine.models import (
    Model,
    Servable,
    fingerprint,
    open_checkpoint,
    tokenizer_hash,
)
from common.engine.models.checkpoint import Checkpoint
from common.engine.models.linear import rounding_of
from common.engine.models.precision import choose_precision
from common.engine.rows.holding import Holding
from common.engine.rows.limits import RequestLimits
from common.engine.rows.request import Request
from common.engine.rows.table import RequestTable
from common.engine.run.copier import PageCopier
from common.engine.run.cpu import use_cpu
from common.engine.run.gpu import use_gpu
from common.engine.run.graphs import CudaRecorder
from common.engine.run.profiler import Profiler
from common.engine.run.runner import ModelRunner
from common.engine.run.stream import Stream, open_stream
from common.engine.schedule.scheduler import Scheduler
from common.engine.sizing import (
    EngineShape,
    free_bytes,
    resolve_device,
    resolve_shape,
)
from common.engine.speculate.speculator import Speculator, check_speculation
from common.engine.update import WeightsUpdate
from common.errors import ConfigError
from common.logs import kv
from common.model_directory import model_directory
from common.processor import matrix_features

PROGRESS_S = 1.0  # between two lines about captured graphs

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """All that a role and a loop are built on. fingerprint: what a peer must agree on, field by
    field, before one computes on KV that the other made."""

    shape: EngineShape
    model: Model
    pool: KVPool
    table: RequestTable
    pages: PageAllocator
    cache: RadixCache
    stream: Stream
    runner: ModelRunner
    limits: RequestLimits
    tiers: Tiers
    copier: PageCopier
    adapters: Adapters
    loader: AdapterLoader
    guides: Guides
    weights: WeightsUpdate
    fingerprint: dict[str, str]
    tokenizer_hash: str
    speculator: Speculator | None = None

    def scheduler(
        self, config: EngineConfig, on_admit: Callable[[Request, Holding], None]
    ) -> Scheduler:
        """The scheduler of this engine; see Scheduler for `on_admit`."""
        spec = self.model.spec
        chunked = {"chunk_tokens": self.shape.chunk_tokens or -1}
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
        """Of this engine; see Profiler."""
        name, device = f"baton-{role}", self.model.device
        return Profiler(config.profile_directory, name, self.stream, device, num_steps)


def build(config: EngineConfig) -> Engine:
    """Loads the model and sizes everything else by what is left.

    Raises:
        ConfigError: the model is not supported, or does not fit.
    """
    device = resolve_device(config.device)
    if device.type == "cpu":
        use_cpu(config.threads or threads_at_hand(os.environ), config.cpu_kernels)
    else:
        use_gpu(device)  # in this thread: the one that launches kernels
    directory = model_directory(config.model, weights=True)
    servable = open_checkpoint(directory, config.model_backend)
    check_speculation(config.speculation, servable.spec)
    precision = choose_precision(config.dtype, device, Checkpoint(directory), matrix_features())
    model = _load(servable, device, precision.dtype, config)
    rounding = rounding_of(device, config.quantize, int8_stored=model.spec.int8_stored)
    bank = bank_of(config.lora, model, free_bytes(device, config.cache.memory_fraction))
    shape = _shape(config, model, bank)
    pool = KVPool(shape.layout, shape.num_pages, device)
    num_host_pages = shape.host_pages + shape.tier_pages
    host_pool = HostPool(shape.layout, num_host_pages, device)
    page_size, windows = shape.layout.page_size, shape.layout.windows
    state_pages = shape.layout.state_pages
    table = RequestTable(
        config.scheduler.num_slots, shape.context_length, page_size, windows, state_pages
    )
    pages = PageAllocator(shape.num_pages)
    cache = RadixCache(page_size, pages, windows, state_pages, enabled=config.cache.prefix_cache)
    copier = PageCopier(pool, host_pool)
    tiers = Tiers(
        HostCache(num_host_pages),
        enabled=shape.tier_pages > 0,
        cache=cache,
        pages=pages,
        tables=shape.layout.tables,
        copier=copier,
    )
    stream = open_stream(device)
    recorder = CudaRecorder() if device.type == "cuda" and config.cuda_graphs else None
    features = every_feature(table, model.spec.vocabulary_size, model.spec.eos_token_ids, device)
    adapters = Adapters(Library(config.lora.max_loaded, config.lora.max_bytes), bank, table)
    shelf = shelf_of(config.lora, model)
    load_all(config.lora, shelf, adapters.library)
    runner = ModelRunner(model, pool, host_pool, table, features, adapters, stream, recorder)
    if device.type == "cuda":
        prepare(runner, largest_forward(shape, config.scheduler.num_slots))
    log.info(
        "engine built %s",
        kv(
            device=str(device),
            computed=servable.computed,
            dtype=str(precision),
            because=precision.because,
            kv=str(shape.layout.dtype).removeprefix("torch."),
            quantize=rounding,
            stored=model.spec.stored,
            pages=shape.num_pages,
            host_pages=num_host_pages,
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
        runner=runner,
        tiers=tiers,
        copier=copier,
        adapters=adapters,
        loader=AdapterLoader(shelf, adapters.library),
        guides=_guides(directory, model),
        weights=WeightsUpdate(config, servable, model),
        limits=RequestLimits(
            context_length=shape.context_length,
            vocabulary_size=model.spec.vocabulary_size,
            tables=shape.layout.tables,
            num_pages=shape.num_pages,
            generates=model.spec.generates,
            num_labels=model.spec.num_labels,
        ),
        fingerprint={
            **fingerprint(directory, config.model_backend),
            "dtype": str(precision),
            "quantize": rounding,
            "page_size": str(page_size),
            "kv_dtype": str(shape.layout.dtype).removeprefix("torch."),
            "kv_layout": shape.layout.describe(),
            "kv_token_bytes": str(shape.layout.token_bytes),
        },
        tokenizer_hash=tokenizer_hash(directory),
        speculator=Speculator.of(config.speculation, config.scheduler.num_slots),
    )


def _guides(directory: Path, model: Model) -> Guides:
    told = directory, model.spec.vocabulary_size, model.spec.eos_token_ids
    return Guides(*told, Beside(*told))


def _load(
    servable: Servable, device: torch.device, dtype: torch.dtype, config: EngineConfig
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
    footprint = measure_footprint(
        model, shape, bank, max_running=config.scheduler.num_slots, graphs=config.cuda_graphs
    )
    log.info(
        "memory beside weights and pages %s",
        kv(
            forward_mib=footprint.forward >> 20,
            graphs_mib=footprint.graphs >> 20,
            state_mib=footprint.state >> 20,
        ),
    )
    free = free_bytes(model.device, fraction) - footprint.total
    return resolve_shape(config, model.spec, dtype=model.dtype, free=free)


def prepare(runner: ModelRunner, num_tokens: int) -> None:
    """All that would otherwise hold up the first requests: graphs, kernels, memory.

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
    # Last, because a capture gives unused memory back to the device.
    runner.rehearse(num_tokens)
