"""Memory for KV pages: their layout, the pool on the device, the pool in host memory.

Knows nothing of who holds a page. Pools are not zeroed: an attention that let a stale key through
would be wrong by whatever the page held before, and zeros would hide it.
"""

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.memory.pinned import pin
from common.engine.rows.batch import PageCopies
from common.errors import ConfigError
from kernels.page_copy import copy_pages

_HUGE_PAGE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class PagedKV:
    """What one attention layer keeps of every token: a key and a value for each head."""

    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One page is one contiguous envelope of all layers, and one transfer descriptor.

    The head is outermost inside a page, so that a tensor-parallel slice is one descriptor too.
    """

    page_size: int
    num_layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, layers: Sequence[PagedKV], page_size: int, dtype: torch.dtype) -> "KVLayout":
        """The layout for a model's layers.

        Raises:
            ConfigError: the layers do not all keep the same.
        """
        if len(set(layers)) != 1:
            raise ConfigError("layers that keep KV of different shapes are not supported")
        return cls(page_size, len(layers), layers[0].kv_heads, layers[0].head_dim, dtype)

    @property
    def page_shape(self) -> tuple[int, ...]:
        """[kv_heads, num_layers, 2, page_size, head_dim]; K at index 0 of the third, V at 1."""
        return (self.kv_heads, self.num_layers, 2, self.page_size, self.head_dim)

    @property
    def token_bytes(self) -> int:
        """Of one token, over all layers and heads."""
        return self.page_bytes // self.page_size

    @property
    def page_bytes(self) -> int:
        return math.prod(self.page_shape) * self.dtype.itemsize

    @property
    def layer_page_bytes(self) -> int:
        """What one layer has of a page."""
        return self.page_bytes // self.num_layers


class KVPool:
    """The pages on the device: `tensor`, [num_pages, *layout.page_shape].

    Written by forwards and swaps on the forward stream, and by reads from other nodes.

    Raises:
        ConfigError: the device has not so much memory.
    """

    def __init__(self, layout: KVLayout, num_pages: int, device: torch.device) -> None:
        self.layout = layout
        self.num_pages = num_pages
        shape = (num_pages, *layout.page_shape)
        try:
            if device.type == "cpu":
                self.tensor = _host_memory(shape, layout.dtype)
            else:
                self.tensor = torch.empty(shape, dtype=layout.dtype, device=device)
        except (torch.OutOfMemoryError, OSError) as error:
            gib = num_pages * layout.page_bytes / 2**30
            raise ConfigError(f"no room for a KV pool of {gib:.1f} GiB on {device}") from error
        # One view per layer: [num_pages, kv_heads, 2, page_size, head_dim].
        self.layers: tuple[Tensor, ...] = self.tensor.unbind(2)

    @property
    def base_address(self) -> int:
        """Of page 0; page i is at base_address + i * page_bytes."""
        return self.tensor.data_ptr()

    @property
    def page_bytes(self) -> int:
        return self.layout.page_bytes

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.layout.page_bytes


class HostPool:
    """Pages in host memory for requests that were taken off the device; pinned for a GPU.

    Raises:
        ConfigError: the machine has not so much memory.
    """

    def __init__(self, layout: KVLayout, num_pages: int, device: torch.device) -> None:
        self.num_pages = num_pages
        try:
            self.tensor = _host_memory((num_pages, *layout.page_shape), layout.dtype)
        except OSError as error:
            gib = num_pages * layout.page_bytes / 2**30
            raise ConfigError(f"no room for {gib:.1f} GiB of host pages") from error
        if device.type == "cuda":
            pin(self.tensor, self)


def swap_out(pool: KVPool, host_pool: HostPool, copies: PageCopies) -> None:
    """device[i] -> host[i], on the stream that is current."""
    device_pages, host_pages = _page_ids(copies)
    copy_pages(pool.tensor, device_pages, host_pool.tensor, host_pages)


def swap_in(pool: KVPool, host_pool: HostPool, copies: PageCopies) -> None:
    """host[i] -> device[i], on the stream that is current."""
    device_pages, host_pages = _page_ids(copies)
    copy_pages(host_pool.tensor, host_pages, pool.tensor, device_pages)


def _page_ids(copies: PageCopies) -> tuple[Tensor, Tensor]:
    return torch.tensor(copies.device_pages), torch.tensor(copies.host_pages)


def _host_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Untouched memory of this process, in huge pages where the system has them: reads from
    another process's pool into such memory are a third faster."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(
        -1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    offset = -whole.data_ptr() % _HUGE_PAGE_BYTES
    return whole[offset : offset + num_bytes].view(dtype).view(shape)
