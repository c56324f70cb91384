"""How large the engine is on this machine: device, dtype, pool, chunk, all decided once.

The configuration says what is wanted; an EngineShape says what is. Neither changes afterwards.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from common.config import EngineConfig
from common.engine.kv import KVLayout
from common.engine.models import ModelSpec, resolve_dtype
from common.engine.models.checkpoint import Checkpoint
from common.errors import ConfigError

CPU_POOL_BYTES = 1 << 30  # unless num_pages says otherwise: a CPU serves small models
DEVICE_CHUNK_TOKENS = 2048
CPU_CHUNK_S = 0.4  # a chunk on a CPU takes at most so long: cancels wait for a chunk's edge


@dataclass(frozen=True, slots=True)
class EngineShape:
    """context_length is what requests may use; chunk_tokens is page aligned; host_pages is the
    room for retracted requests."""

    device: torch.device
    dtype: torch.dtype
    layout: KVLayout
    context_length: int
    num_pages: int
    host_pages: int
    chunk_tokens: int


def resolve_device(name: str) -> torch.device:
    """Raises ConfigError where the device is not there."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"engine.device: {name!r} is no device") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"engine.device: {device.type} is not supported, only cpu and cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"engine.device: {name} is not there, this machine has "
            f"{torch.cuda.device_count()} CUDA devices"
        )
    return device


def free_bytes(device: torch.device) -> int:
    """Memory of the device that is free now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with Path("/proc/meminfo").open() as lines:
        available = next(line for line in lines if line.startswith("MemAvailable"))
    return int(available.split()[1]) * 1024


def weight_bytes(directory: Path, spec: ModelSpec, dtype: torch.dtype) -> int:
    """What the weights take in `dtype`. Raises ConfigError where there are none to read."""
    stored = Checkpoint(directory).tensors.values()
    numbers = sum(torch.Size(tensor.shape).numel() for tensor in stored)
    return numbers * dtype.itemsize


def resolve_shape(config: EngineConfig, spec: ModelSpec, *, free: int) -> EngineShape:
    """What this machine gives the model.

    Args:
        free: bytes of device memory left after the weights.
    Raises:
        ConfigError: with the numbers, where the model does not fit.
    """
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    context_length = config.context_length or spec.context_length
    if context_length > spec.context_length:
        raise ConfigError(
            f"engine.context_length: {context_length} is more than the model's "
            f"{spec.context_length}"
        )
    page_size = config.cache.page_size
    layout = KVLayout.of(spec.layers, page_size, dtype)
    room = int(free * config.cache.memory_fraction)
    if device.type == "cpu":
        room = min(room, CPU_POOL_BYTES)
    num_pages = config.cache.num_pages or _pages_in(room, config, layout, context_length)
    if num_pages * layout.page_bytes > free:
        raise ConfigError(
            f"engine.cache.num_pages: {num_pages} pages of {layout.page_bytes} bytes take "
            f"{_gib(num_pages * layout.page_bytes)}, {_gib(free)} are free after the weights"
        )
    host_pages = config.cache.host_pages
    return EngineShape(
        device=device,
        dtype=dtype,
        layout=layout,
        context_length=context_length,
        num_pages=num_pages,
        host_pages=num_pages if host_pages < 0 else host_pages,
        chunk_tokens=_chunk_tokens(config, spec, device, context_length),
    )


def _pages_in(room: int, config: EngineConfig, layout: KVLayout, context_length: int) -> int:
    pages_of_one = -(-context_length // layout.page_size)
    num_pages = min(room // layout.page_bytes, pages_of_one * config.scheduler.max_running)
    if num_pages < 2:
        raise ConfigError(
            f"no room for a KV pool: {_gib(room)} may be used after the weights, one page takes "
            f"{_gib(layout.page_bytes)}"
        )
    return num_pages


def _chunk_tokens(
    config: EngineConfig, spec: ModelSpec, device: torch.device, context_length: int
) -> int:
    wanted, page_size = config.scheduler.chunk_tokens, config.cache.page_size
    if wanted < 0:
        wanted = context_length
    elif wanted == 0:
        wanted = DEVICE_CHUNK_TOKENS
        if device.type == "cpu":
            wanted = min(wanted, int(CPU_CHUNK_S * _cpu_flops() / _flops_per_token(spec)))
    return max(page_size, wanted // page_size * page_size)


def _flops_per_token(spec: ModelSpec) -> int:
    attention = spec.hidden_size * spec.head_dim * (2 * spec.num_heads + 2 * spec.kv_heads)
    mlp = 3 * spec.hidden_size * spec.intermediate_size
    return 2 * spec.num_layers * (attention + mlp)


def _cpu_flops() -> float:
    """Measured: what a matrix product of a layer's size reaches here, at best of three."""
    a, b = torch.ones(256, 1024), torch.ones(1024, 1024)
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - started)
    return 2.0 * a.shape[0] * b.numel() / best


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
