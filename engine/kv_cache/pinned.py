"""Pinned host memory of exactly the requested size, which a GPU copies from and to.

torch's allocator of pinned memory is for the small buffers of a step. It rounds up to a power of
two, so that 35 GiB would take 64.
"""

import weakref

import torch
from torch import Tensor

from common.errors import ConfigError


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
    # Not at exit, because the driver may be gone by then. The end of the process unpins too.
    weakref.finalize(owner, runtime.cudaHostUnregister, address).atexit = False
