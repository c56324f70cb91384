"""Choice of an operation's implementation: Triton kernel, operation compiled for this CPU, or torch
reference."""

import functools
import os

import torch
import triton
from torch import Tensor
from triton.runtime import driver

from kernels.cpu.operators import Operators

# Triton reads it once, when a kernel is decorated. The interpreter computes bfloat16 incorrectly.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# Launches are tuned for Triton 3.9. Older releases, such as 3.7 in torch's CUDA wheels, would spill
# registers with some of them.
OLDER_TRITON = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)

_LARGEST_SHARED_BYTES = 232448  # of one block, on compute capability 9.0


def uses_triton(tensor: Tensor) -> bool:
    """Return whether an operation on this tensor uses its Triton kernel. Every operation calls
    this.

    Tests replace only this function, to run kernels in Triton's interpreter on a CPU, or to compile
    without running them.
    """
    return tensor.is_cuda


_compiled: list[Operators] = []


def use_compiled(operators: Operators | None) -> None:
    """Set the result of `compiled` for this process. Must be called before a model is loaded."""
    _compiled[:] = [] if operators is None else [operators]


def compiled(tensor: Tensor) -> Operators | None:
    """Return the compiled operators that replace the reference, if `uses_triton` is False."""
    return compiled_for(tensor.device)


def compiled_for(device: torch.device) -> Operators | None:
    """Return the result of `compiled` for tensors on this device."""
    return _compiled[0] if _compiled and device.type == "cpu" else None


_batch_invariant: list[bool] = [False]


def use_batch_invariant(wanted: bool) -> None:
    """Set the result of `batch_invariant` for this process, before a step is planned."""
    _batch_invariant[0] = wanted


def batch_invariant() -> bool:
    """Return whether the bits of a row in a Triton kernel must not depend on the other rows.

    Operations whose tiles depend only on the model need not check it.
    """
    return _batch_invariant[0]


def architecture() -> int:
    """Return 90 for compute capability 9.0, which the interpreter emulates."""
    return 90 if INTERPRETED else int(driver.active.get_current_target().arch)


def shared_bytes() -> int:
    """Return the limit of one block's shared memory on the current device, in bytes. The
    interpreter emulates compute capability 9.0.
    """
    return (
        _LARGEST_SHARED_BYTES if INTERPRETED else _shared_bytes(driver.active.get_current_device())
    )


@functools.cache
def _shared_bytes(number: int) -> int:
    """Return the limit that Triton checks before it loads a kernel."""
    return int(driver.active.utils.get_device_properties(number)["max_shared_mem"])


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors. 4 on a CPU, where it affects no result."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
