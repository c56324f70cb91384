"""Programmatic dependent launch: a kernel starts while the previous one in its stream still ends.

It removes the gap between two kernels. A decode step has some hundred gaps. Requires compute
capability 9.0. The interpreter does not support it. Captured graphs contain it from CUDA 12.3 on,
whose graphs have edges for it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels import device

LEAST_CAPABILITY = 90
LEAST_DRIVER = 12030  # CUDA 12.3, as the driver counts

# Compiled but never run so far. tools/bench/gpu measures the gain.
ENABLED = False


def use_early_launch(enabled: bool) -> None:
    """Set whether kernels of this process start early, before any is launched."""
    global ENABLED
    ENABLED = enabled


def launches_early() -> bool:
    """Return the value of EARLY for every kernel of a layer, and of `launch_pdl` for its launch."""
    return ENABLED and not device.INTERPRETED and device.architecture() >= LEAST_CAPABILITY


@triton.jit
def start(EARLY: tl.constexpr):
    """Start a kernel. Must be the first line in every program of it, before any read or write.

    Waits until the previous kernel has ended, and lets the next one begin. So at most two overlap.
    A kernel without this line waits for the one before it, and so for all.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
