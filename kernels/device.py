"""Where an operation runs: as Triton's kernel, compiled for this CPU, or as torch's reference."""

import functools
import os

import torch
from torch import Tensor
from triton.runtime import driver

from kernels.cpu.operators import Operators

# Triton reads it once, where a kernel is decorated; the interpreter computes bfloat16 wrongly.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

_LARGEST_SHARED_BYTES = 232448  # of one block, on compute capability 9.0


def uses_triton(tensor: Tensor) -> bool:
    """Every operation asks here which of its implementations its arguments mean.

    The one seam for tests: replaced, kernels run on a CPU in Triton's interpreter, or are compiled
    and not run.
    """
    return tensor.is_cuda


_compiled: list[Operators] = []


def use_compiled(operators: Operators | None) -> None:
    """What `compiled` answers from now on, in this process. Before a model is loaded."""
    _compiled[:] = [] if operators is None else [operators]


def compiled(tensor: Tensor) -> Operators | None:
    """Asked where `uses_triton` has said no: what takes the place of the reference, if anything."""
    return compiled_for(tensor.device)


def compiled_for(device: torch.device) -> Operators | None:
    """`compiled` before there is a tensor."""
    return _compiled[0] if _compiled and device.type == "cpu" else None


def architecture() -> int:
    """90 for compute capability 9.0, which the interpreter stands for too."""
    return 90 if INTERPRETED else int(driver.active.get_current_target().arch)


def shared_bytes() -> int:
    """Return how much shared memory one block may use on the current device, in bytes.

    The interpreter stands for compute capability 9.0.
    """
    return (
        _LARGEST_SHARED_BYTES if INTERPRETED else _shared_bytes(driver.active.get_current_device())
    )


@functools.cache
def _shared_bytes(number: int) -> int:
    """Return the number that Triton compares a kernel with before it loads it."""
    return int(driver.active.utils.get_device_properties(number)["max_shared_mem"])


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """How many programs the device runs at once; 4 on a CPU, where the number changes no result."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
