"""Cost for a producer of a separate NIXL agent per consumer, each with the whole pool registered.

Uses RDMA if available, which pins and maps every page. Otherwise uses cma, which pins no page, so
that the figures are those of the agent alone.
"""

import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.errors import TransferError
from kvtransfer.backends.base import PagePool
from kvtransfer.backends.nixl.agent import NixlHostMemory, NixlMemory
from kvtransfer.backends.nixl.backend import ConsumerAgents, NixlListener
from kvtransfer.backends.nixl.paths import PATHS, PathKind
from tools.bench.support.record import percentiles, say, show

PAGE_BYTES = 64 << 10
_WAIT_S = 60.0
_WARM_UP = 3


class _ProcessResources(NamedTuple):
    """The resources of this process. Pages pinned by a network card are not counted twice."""

    memory_kib: float
    pinned_kib: float
    descriptors: float
    mappings: float

    @classmethod
    def now(cls) -> "_ProcessResources":
        status = Path("/proc/self/status").read_text()
        memory, pinned = (
            int(re.search(rf"^{field}:\s+(\d+)", status, re.MULTILINE)[1])  # type: ignore[index]
            for field in ("VmRSS", "VmPin")
        )
        maps = Path("/proc/self/maps").read_text().count("\n")
        return cls(memory, pinned, len(os.listdir("/proc/self/fd")), maps)


def measure(pool_gib: float, consumers: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return one row. Every page of the pool is resident before the first agent is created."""
    num_pages = int(pool_gib * (1 << 30)) // PAGE_BYTES
    pages = np.ones((num_pages, PAGE_BYTES), np.uint8)
    memory = NixlHostMemory(PagePool(pages.ctypes.data, PAGE_BYTES, num_pages, "cpu"))
    kind = _kind(memory)
    agents = ConsumerAgents([kind], memory, max_consumers=consumers + _WARM_UP)
    for consumer in range(-_WARM_UP, 0):
        agents.prepare(consumer).result(_WAIT_S)
        agents.dismiss(consumer)
    agents.prepare(0).result(_WAIT_S)
    before = _ProcessResources.now()
    made_s = []
    for consumer in range(1, consumers):
        started = time.perf_counter()
        agents.prepare(consumer).result(_WAIT_S)
        made_s.append(time.perf_counter() - started)
    held = zip(_ProcessResources.now(), before, strict=True)
    started = time.perf_counter()
    agents.close()
    ended_s = time.perf_counter() - started
    of_each = _ProcessResources(*(round((now - then) / (consumers - 1), 1) for now, then in held))
    row = {
        "path": kind.name,
        "pool_gib": pool_gib,
        "consumers": consumers,
        "made_ms": percentiles(made_s, 1e3),
        "ended_ms": round(1e3 * ended_s / consumers, 2),
        **of_each._asdict(),
    }
    show([row])
    return [row], {}


def _kind(memory: NixlMemory) -> PathKind:
    """Return the first path with keys that this machine supports."""
    for kind in PATHS:
        if kind.keyed and kind.memory == "cpu":
            try:
                NixlListener(kind, memory).close()
            except TransferError as error:
                say(f"not over {kind.name}: {error}")
            else:
                return kind
    return replace(PATHS[0], keyed=True)
