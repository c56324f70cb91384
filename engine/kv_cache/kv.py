"""Memory for pages: the pool on the device, the pool in host memory, and copies between them.

This module does not know the holders of pages. Only the layout knows the contents of a page. Pools
are not zeroed: if attention read a stale key, zeros would hide the error.

Pinned memory has exactly the requested size. torch's allocator would round it up to a power of two
(35 GiB to 64 GiB).
"""

import weakref
from collections.abc import Mapping

import torch
from torch import Tensor

from common.errors import ConfigError
from engine.batch.batch import PageCopies
from engine.kv_cache.layout import KVLayout
from kernels.cpu.memory import empty_in_huge_pages
from kernels.cuda.driver import OutOfDeviceMemory
from kernels.cuda.virtual_memory import Region, VirtualMemory
from kernels.linear_attention.state_cells import CellView
from kernels.pages.copy import copy_pages


def pin(memory: Tensor, owner: object) -> None:
    """Pin host memory in place until `owner` is deleted. `owner` must keep the memory alive.

    Raises:
        ConfigError: the driver cannot pin this much memory.
    """
    if not memory.nbytes:
        return
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = memory.data_ptr()
    result = runtime.cudaHostRegister(address, memory.nbytes, 0)
    if int(result):
        raise ConfigError(
            f"{memory.nbytes / 2**30:.1f} GiB of host memory cannot be pinned (CUDA error "
            f"{int(result)}); lower engine.cache.swap_pages or engine.offload.cpu_bytes"
        )
    # Not at exit, because the driver may already be unloaded. The end of the process unpins, too.
    weakref.finalize(owner, runtime.cudaHostUnregister, address).atexit = False


class KVPool:
    """The pages on the device: `tensor`, uint8 [num_pages, layout.page_bytes].

    layers: keys and values of each layer, see KVLayout.view.
    tables: the page table of each layer.
    cells: state cells of each layer, by name.
    draft: the drafter's part, if there is a drafter.
    region: the memory of `tensor` if it can be released. None for host memory, for example.

    Forwards and swaps write it on the forward stream. Reads from other nodes write it, too.

    Args:
        memory: virtual memory of the device, for a region.
    Raises:
        ConfigError: the device does not have enough memory.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int,
        device: torch.device,
        memory: VirtualMemory | None = None,
    ) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.region: Region | None = None
        shape = (num_pages, layout.page_bytes)
        try:
            if memory is not None:
                self.region = memory.reserve(self.num_bytes)
                self.region.map()
                self.tensor = self.region.tensor(0, self.num_bytes).view(shape)
            elif device.type == "cpu":  # other processes read huge pages a third faster
                self.tensor = empty_in_huge_pages(shape, torch.uint8)
            else:
                self.tensor = torch.empty(shape, dtype=torch.uint8, device=device)
        except (torch.OutOfMemoryError, OutOfDeviceMemory, OSError) as error:
            gib = num_pages * layout.page_bytes / 2**30
            raise ConfigError(
                f"not enough memory for a KV pool of {gib:.1f} GiB on {device}"
            ) from error
        self.layers: tuple[Tensor, ...] = tuple(
            layout.view(self.tensor, layer) for layer in range(len(layout.places))
        )
        self.tables = tuple(place.table for place in layout.places)
        self.cells: tuple[Mapping[str, CellView], ...] = tuple(
            layout.cells(self.tensor, layer) for layer in range(len(layout.places))
        )
        self.draft = layout.draft_view(self.tensor)

    @property
    def base_address(self) -> int:
        """Address of page 0. Page i is at base_address + i * page_bytes."""
        return self.tensor.data_ptr()

    @property
    def page_bytes(self) -> int:
        return self.layout.page_bytes

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.layout.page_bytes


class HostPool:
    """Pages in host memory, for swapped-out requests and evicted prefixes. Pinned if there is a
    GPU.

    Raises:
        ConfigError: the machine does not have enough memory.
    """

    def __init__(self, layout: KVLayout, num_pages: int, device: torch.device) -> None:
        self.num_pages = num_pages
        try:
            self.tensor = empty_in_huge_pages((num_pages, layout.page_bytes), torch.uint8)
        except OSError as error:
            gib = num_pages * layout.page_bytes / 2**30
            raise ConfigError(f"not enough memory for {gib:.1f} GiB of host pages") from error
        if device.type == "cuda":
            pin(self.tensor, self)


def swap_out(pool: KVPool, host_pool: HostPool, copies: PageCopies) -> None:
    """Copy device[i] -> host[i] on the current stream."""
    device_pages, host_pages = _page_ids(copies)
    copy_pages(pool.tensor, device_pages, host_pool.tensor, host_pages)


def swap_in(pool: KVPool, host_pool: HostPool, copies: PageCopies) -> None:
    """Copy host[i] -> device[i] on the current stream."""
    device_pages, host_pages = _page_ids(copies)
    copy_pages(host_pool.tensor, host_pages, pool.tensor, device_pages)


def _page_ids(copies: PageCopies) -> tuple[Tensor, Tensor]:
    return torch.tensor(copies.device_pages), torch.tensor(copies.host_pages)
