"""The sizes of the engine on this machine: device, dtype, page pool and chunk, decided once.

The configuration has the requested values, an EngineShape the actual ones. Both are immutable.
"""

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from common.config import EngineConfig, Quantize, gpus_of
from common.errors import ConfigError
from engine.core import CoreShape
from engine.kv_cache.layout import KVLayout
from engine.models import ModelSpec
from engine.models.linear import Matrix, form_of, rounding_of
from engine.models.spec import LoadTarget
from engine.ranks import WHOLE, Share
from engine.runner.gpu import check_allocator, has_gpu
from kernels.cuda.virtual_memory import VirtualMemory, virtual_memory
from kernels.narrow import FIRST_ARCHITECTURE

# A CPU's page pool, unless num_pages is set. Other processes share the memory: another engine or
# two of `baton up`, and the same number of host pages for retracted requests.
CPU_POOL_BYTES = 1 << 30
CPU_POOL_FRACTION = 0.125  # share of the free memory, if that is more
DEVICE_CHUNK_TOKENS = 2048
ROOM_FRACTION = 1 / 16  # share of free memory for the activations of a larger chunk
CUDA_CONTEXT_BYTES = 1 << 29  # memory of driver and libraries outside torch's allocator
NCCL_BYTES = 1 << 30  # memory of a rank. An upper bound that was not measured yet: see docs/gpu.md.
PINNED_BYTES = 4 << 30  # for retracted requests on CUDA, unless host_pages is set
# Limits PINNED_BYTES to this share of free host memory, since other nodes start here, too.
PINNED_FRACTION = 0.25
_NARROW = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
CPU_CHUNK_S = 0.4  # maximum seconds of a chunk on a CPU: cancellation takes effect between chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape(CoreShape):
    """The actual sizes of an engine.

    Attributes:
        layout: layout of this rank's pages.
        whole: layout of the whole model, which nodes compare.
        prefill_tokens: prompt tokens of the largest forward.
    """

    device: torch.device
    dtype: torch.dtype
    layout: KVLayout
    whole: KVLayout
    prefill_tokens: int


def resolve_device(name: str, rank: int = 0) -> torch.device:
    """Return the device of a rank. Raise ConfigError if it does not exist, or cannot be used in its
    current setup.

    Args:
        name: name in EngineConfig. With auto and cuda, the ranks use the first GPUs.
    """
    device = _device_named(name, rank)
    if device.type == "cuda":
        check_allocator(os.environ)
    return device


def _device_named(name: str, rank: int) -> torch.device:
    if name == "auto":
        name = "cuda" if has_gpu() else "cpu"
    if name == "cuda":
        name = f"cuda:{rank}"
    elif gpus := gpus_of(name):
        name = f"cuda:{gpus[rank]}"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"engine.device: {name!r} is not a device") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"engine.device: {device.type} is not supported, only cpu and cuda")
    if device.type == "cpu":
        return device
    has_gpu()  # raises an error with the reason if there is a GPU that cannot be used
    if device.index >= torch.cuda.device_count():
        raise ConfigError(
            f"engine.device: {name} does not exist, this machine has "
            f"{torch.cuda.device_count()} CUDA devices"
        )
    return device


def free_bytes(device: torch.device, fraction: float) -> int:
    """Return the bytes that this process may still allocate.

    Args:
        fraction: this process's share. Of a GPU's whole memory, including memory that it has
            already allocated. Of the available memory of a host.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allocated = (
            torch.cuda.memory_reserved(device) + virtual_memory(device.index or 0).mapped_bytes
        )
        taken = allocated + CUDA_CONTEXT_BYTES
        return min(free, int(fraction * total) - taken)
    return int(fraction * min(_available_bytes(), container_bytes()))


def _available_bytes() -> int:
    with Path("/proc/meminfo").open() as lines:
        available = next(line for line in lines if line.startswith("MemAvailable"))
    return int(available.split()[1]) * 1024


def container_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the free memory of this process's container (cgroup v2), or infinity without a
    limit."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        taken = int((cgroup / "memory.current").read_text())
    except OSError:
        return math.inf
    return math.inf if limit == "max" else max(0, int(limit) - taken)


def releasable_memory(config: EngineConfig, device: torch.device) -> VirtualMemory | None:
    """Return virtual memory of a GPU, if pages and weights are to be allocated there so that they
    can be released. Otherwise None."""
    return virtual_memory(device.index or 0) if config.memory_saver else None


def kept_in(config: EngineConfig, device: torch.device) -> torch.dtype | None:
    """Return the dtype of `engine.cache.dtype`. None: the compute dtype.

    Raises:
        ConfigError: this GPU does not support the dtype.
    """
    if config.cache.dtype == "auto":
        return None
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if 10 * major + minor < FIRST_ARCHITECTURE:
            raise ConfigError(
                f"engine.cache.dtype: {config.cache.dtype} needs a GPU of compute capability "
                f"{FIRST_ARCHITECTURE / 10} or above, {device} has {major}.{minor}"
            )
    return _NARROW[config.cache.dtype]


def whole_layout(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> KVLayout:
    """Return the layout of pages with all heads of a model."""
    kept_as = kept_in(config, device)
    return KVLayout.of(spec.layers, config.cache.page_size, dtype, kept_as, spec.draft)


def part_of(whole: KVLayout, share: Share) -> KVLayout:
    """Return the layout of a rank's pages. Raise ConfigError if the ranks cannot split the
    model."""
    stages = whole.by_stage(share.node)
    return stages[0 if share.stage is None else share.stage.number]


def largest_page(whole: KVLayout, share: Share) -> int:
    """Return the page size in bytes of the rank with the largest pages."""
    return max(part.page_bytes for part in whole.by_stage(share.node))


def resolve_shape(
    config: EngineConfig,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    free: int,
    share: Share = WHOLE,
) -> EngineShape:
    """Determine the actual sizes for the model on this machine.

    Args:
        dtype: compute dtype of the model.
        free: bytes of device memory for this rank's pages, after weights, the largest forward and
            graphs.
    Raises:
        ConfigError: the model is too large. The error has the numbers.
    """
    device = resolve_device(config.device, config.parallel.place(share.node_rank))
    context_length = config.context_length or spec.context_length
    if context_length > spec.context_length:
        raise ConfigError(
            f"engine.context_length: {context_length} is more than the model's "
            f"{spec.context_length}"
        )
    whole = whole_layout(config, spec, dtype, device)
    layout = part_of(whole, share)
    page_bytes = largest_page(whole, share)
    chunk_tokens = _chunk_tokens(config, spec, device, dtype, free)
    whole_prompts = max(config.scheduler.max_prefill_tokens, context_length)
    prefill_tokens = whole_prompts if chunk_tokens is None else chunk_tokens
    free -= _held_bytes(config, spec, dtype, prefill_tokens)
    room = min(free, _cpu_room(free, share.num_ranks)) if device.type == "cpu" else free
    num_pages = config.cache.num_pages or _pages_in(
        room, page_bytes, config, layout.tables.pages_to_compute(context_length)
    )
    if num_pages * page_bytes > free:
        raise ConfigError(
            f"engine.cache.num_pages: {num_pages} pages of {page_bytes} bytes take "
            f"{_gib(num_pages * page_bytes)}, {_gib(free)} are free"
        )
    return EngineShape(
        device=device,
        dtype=dtype,
        layout=layout,
        whole=whole,
        tables=layout.tables,
        context_length=context_length,
        num_pages=num_pages,
        host_pages=host_pages_of(config, layout, device, num_pages),
        tier_pages=config.offload.cpu_bytes // (share.num_ranks * page_bytes)
        if config.cache.prefix_cache
        else 0,
        chunk_tokens=chunk_tokens,
        prefill_tokens=prefill_tokens,
    )


def host_pages_of(
    config: EngineConfig, layout: KVLayout, device: torch.device, num_pages: int
) -> int:
    """Return the number of host pages of a rank for retracted requests, given a pool of
    `num_pages`."""
    if config.cache.swap_pages >= 0:
        return config.cache.swap_pages
    if device.type == "cpu":
        return num_pages
    room = min(PINNED_BYTES, free_bytes(torch.device("cpu"), PINNED_FRACTION))
    room //= config.parallel.ranks_per_host
    return min(num_pages, room // layout.page_bytes)


def _held_bytes(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, num_tokens: int) -> int:
    """Return the bytes of the activations that split prefill keeps between two groups of layers:
    two per token."""
    if not config.scheduler.split_prefill_ms:
        return 0
    return 2 * num_tokens * spec.hidden_size * dtype.itemsize


def _pages_in(room: int, page_bytes: int, config: EngineConfig, pages_of_one: int) -> int:
    num_pages = min(room // page_bytes, pages_of_one * config.scheduler.max_running_requests)
    if num_pages < 2:
        raise ConfigError(
            f"not enough memory for a KV pool: {_gib(room)} are free, and a page takes "
            f"{_gib(page_bytes)}"
        )
    return num_pages


def _cpu_room(free: int, num_ranks: int) -> int:
    return max(CPU_POOL_BYTES // num_ranks, int(CPU_POOL_FRACTION * free))


def _chunk_tokens(
    config: EngineConfig, spec: ModelSpec, device: torch.device, dtype: torch.dtype, free: int
) -> int | None:
    wanted, page_size = config.scheduler.chunked_prefill_tokens, config.cache.page_size
    if wanted < 0:
        return None
    if wanted == 0:
        most = config.scheduler.auto_chunk_tokens or DEVICE_CHUNK_TOKENS
        wanted = min(most, max(DEVICE_CHUNK_TOKENS, _tokens_in(ROOM_FRACTION * free, spec, dtype)))
        if device.type == "cpu":
            wanted = DEVICE_CHUNK_TOKENS
            rounding = rounding_of(device, config.quantize, spec.format)
            rate = _cpu_flops(dtype, "none" if rounding == "none" else "int8")
            wanted = min(wanted, int(CPU_CHUNK_S * rate / (2 * spec.products_per_token)))
    return max(page_size, wanted // page_size * page_size)


def _tokens_in(num_bytes: float, spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return the tokens of a forward whose activations fit in `num_bytes`: at most the outputs of
    one layer's products per token."""
    outputs = spec.products_per_token / (len(spec.layers) * spec.hidden_size)
    return int(num_bytes / (outputs * dtype.itemsize))


def _cpu_flops(dtype: torch.dtype, quantize: Quantize) -> float:
    """Return the best FLOP/s of five runs of the model's own product, with a matrix of a layer's
    size and this thread's number of threads."""
    x, weight = torch.ones(256, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
    linear = form_of(LoadTarget(torch.device("cpu"), dtype, quantize)).hold(Matrix(weight))
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        linear.apply(x)
        best = min(best, time.perf_counter() - started)
    return 2.0 * x.shape[0] * weight.numel() / best


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3f} GiB"
