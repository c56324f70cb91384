"""Limits of this process: open files, and memory that the allocator keeps after large messages.

glibc gives each allocating thread an arena and keeps everything below the arena's last live byte.
Each freed large buffer raises the size from which buffers are mapped separately. gRPC has many
threads and buffers of megabytes, so after an hour a process of 40 MiB holds 100. With other C
libraries nothing is changed.

An aborted call is a reference cycle, also inside gRPC: the error, its frames, and their message of
megabytes. Python collects cycles when there are many objects, not when they are large, so
collections are started explicitly.

The default limit of open files is mostly 1024, for old programs that use select. Baton uses poll
and epoll.
"""

import asyncio
import ctypes
import gc
import resource

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_LARGE_BYTES = 1 << 20
_NUM_ARENAS = 2
_TRIM_EVERY_S = 20.0


def hold_little() -> None:
    """Limit the allocator. Called once before threads start, in processes without large buffers."""
    libc = ctypes.CDLL(None)
    mallopt = getattr(libc, "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, _NUM_ARENAS)
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _LARGE_BYTES)


def stay() -> None:
    """Exclude all current objects from later garbage collections."""
    gc.collect()
    gc.freeze()


async def keep_trimming() -> None:
    """Collect cycles and release free memory of arenas at intervals. Never returns."""
    while True:
        await asyncio.sleep(_TRIM_EVERY_S)
        gc.collect()
        await asyncio.to_thread(trim)


def trim() -> None:
    """Release free memory inside arenas to the system."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def resident_bytes() -> int:
    """Return the bytes of RAM that this process uses, including shared memory."""
    with open("/proc/self/statm", "rb") as sizes:
        return int(sizes.read().split()[1]) * resource.getpagesize()


ENOUGH = 1 << 16


def allow_many() -> None:
    """Raise the limit of open files to ENOUGH, or to the system's maximum. Never lower it.

    Processes started later inherit it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
