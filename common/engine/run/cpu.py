"""What is set for the process before an engine computes on a CPU: threads, compiled operations.

Knows nothing of models or memory.
"""

import logging

import torch

from common.config import CpuKernels
from common.logs import kv
from kernels import device
from kernels.cpu.compiler import NotCompiled, cache_directory, library
from kernels.cpu.operators import Operators

log = logging.getLogger(__name__)


def use_cpu(threads: int, cpu_kernels: CpuKernels) -> None:
    """The first time on a machine this takes the seconds that a compiler takes. Never fails: what
    cannot be compiled, torch computes."""
    torch.set_num_threads(threads)
    device.use_compiled(_operators(threads) if cpu_kernels == "auto" else None)


def _operators(threads: int) -> Operators | None:
    directory = cache_directory()

    def tell() -> None:
        log.info("compiling operations for this CPU: seconds, once %s", kv(cache=directory))

    try:
        return Operators(library(directory, tell), threads)
    except (NotCompiled, OSError) as error:
        log.warning("no compiled operations, so steps are slower %s", kv(because=error))
        return None
