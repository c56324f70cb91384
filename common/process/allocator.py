"""Memory that strangers' messages have taken goes back to the system.

The C library gives each thread that allocates an arena, raises the size from which on a buffer is
memory of its own with every large one that it has freed, and keeps what lies below the last live
byte of an arena. gRPC has many threads and buffers of megabytes: after an hour of them a program
of 40 MiB holds 100. Knows glibc, and does nothing elsewhere.

A call that is aborted is a cycle, in gRPC's own records too: error, frames, and the message of
megabytes that they have at hand. Python looks for old cycles when there are many objects, not when
they are large, so that it is asked to.
"""

import asyncio
import ctypes
import gc

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_LARGE_BYTES = 1 << 20
_NUM_ARENAS = 2
_TRIM_EVERY_S = 20.0


def hold_little() -> None:
    """Called once, by a program whose own work takes no large buffers, before it has threads."""
    libc = ctypes.CDLL(None)
    mallopt = getattr(libc, "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, _NUM_ARENAS)
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _LARGE_BYTES)


def stay() -> None:
    """What is here now stays until the end: whoever looks for cycles need not look at it."""
    gc.collect()
    gc.freeze()


async def keep_trimming() -> None:
    """Gives back what cycles hold, and what is free inside of arenas, now and then, without end."""
    while True:
        await asyncio.sleep(_TRIM_EVERY_S)
        gc.collect()
        await asyncio.to_thread(trim)


def trim() -> None:
    """Gives back what is free inside of arenas."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
