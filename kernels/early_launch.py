"""Programmatic dependent launch: a kernel starts while the previous one in its stream still ends.

It removes the gap between two kernels, of which a decode step has some hundreds. Requires compute
capability 9.0. The interpreter does not support it. Captured graphs contain it from CUDA 12.3 on,
which has graph edges for it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels import device

LEAST_CAPABILITY = 90
LEAST_DRIVER = 12030  # CUDA 12.3, in the driver's numbering

# Compiled but not run on a GPU so far. tools/bench/gpu measures the gain.
ENABLED = False


def use_early_launch(enabled: bool) -> None:
    """Set whether kernels of this process start early. Must be called before the first launch."""
    global ENABLED
    ENABLED = enabled


def launches_early() -> bool:
    """Return the arguments `EARLY` and `launch_pdl` for the launch of a layer's kernels."""
    return ENABLED and not device.INTERPRETED and device.architecture() >= LEAST_CAPABILITY


@triton.jit
def start(EARLY: tl.constexpr):
    """Wait until the previous kernel has ended, then let the next one begin. So at most two
    overlap.

    Must be the first line in every program of a kernel, before any read or write. A kernel without
    this line waits for the previous one, and with it for all earlier ones.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
