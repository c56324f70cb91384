"""Setup of a process that computes on a CPU: its threads and its compiled operations."""

import logging

import torch

from common.config import CpuKernels
from common.errors import ConfigError
from common.logs import kv
from kernels import device
from kernels.cpu.compiler import NotCompiled, cache_directory, library, prebuilt
from kernels.cpu.operators import Operators

log = logging.getLogger(__name__)


def use_cpu(threads: int, cpu_kernels: CpuKernels) -> None:
    """Set the number of threads of this process and load the compiled operations.

    The first start on a machine compiles them, which may take minutes, unless the image has them.

    Raises:
        ConfigError: compiled operations are required and cannot be loaded.
    """
    torch.set_num_threads(threads)
    if cpu_kernels == "off":
        device.use_compiled(None)
        return
    try:
        device.use_compiled(_operators(threads))
    except (NotCompiled, OSError) as error:
        if cpu_kernels == "required":
            raise ConfigError(
                f"engine.cpu_kernels is required, and there are no compiled operations: {error}. "
                "With auto the node starts without them, and steps are about 3.5 times slower"
            ) from error
        log.warning("compiled CPU kernels are unavailable, steps are slower %s", kv(reason=error))
        device.use_compiled(None)


def _operators(threads: int) -> Operators:
    directory = cache_directory()

    def report() -> None:
        log.info("compiling kernels once, which may take minutes %s", kv(cache=directory))

    return Operators(prebuilt() or library(directory, report), threads)
