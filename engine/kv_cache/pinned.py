"""Host memory that a GPU copies from and into by itself, of the size that is asked for.

torch's own allocator of pinned memory is for the small buffers of a step: it rounds up to a power
of two, so that 35 GiB would take 64.
"""

import weakref

import torch
from torch import Tensor

from common.errors import ConfigError


def pin(memory: Tensor, owner: object) -> None:
    """Pins host memory where it is, until `owner` is gone, which must keep it alive so long.

    Raises:
        ConfigError: the driver refuses so much.
    """
    if not memory.nbytes:
        return
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = memory.data_ptr()
    result = runtime.cudaHostRegister(address, memory.nbytes, 0)
    if int(result):
        raise ConfigError(
            f"{memory.nbytes / 2**30:.1f} GiB of host memory cannot be pinned (CUDA error "
            f"{int(result)}); engine.cache.host_pages and engine.tiers.host_bytes make it smaller"
        )
    # Not at exit, when the driver may be gone before; the process's end unpins too.
    weakref.finalize(owner, runtime.cudaHostUnregister, address).atexit = False
