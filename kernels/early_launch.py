"""Programmatic dependent launch: a kernel starts while the one before it in its stream still ends.

What it saves is the gap between two kernels, which a decode step has some hundred of. Only from
compute capability 9.0 on; the interpreter knows nothing of it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels import device

# Compiled and counted, and never run: tools/bench/gpu says what it saves.
ENABLED = False


def launches_early() -> bool:
    """What every kernel of a layer is given as EARLY, and its launch as `launch_pdl`."""
    return ENABLED and not device.INTERPRETED and device.architecture() >= 90


@triton.jit
def start(EARLY: tl.constexpr):
    """The first line of a kernel, in every program of it: nothing may be read or written before.

    Waits until the kernel before has ended, and lets the one after it begin. So at most two
    overlap, and a kernel without this line, which waits for the one before it, waits for all.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
