"""Copies of pages between device and host memory, concurrent with steps. The offload tiers use
them.

Each direction has a thread, and with CUDA a stream. It knows neither content nor holders of pages.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch.batch import Ints, PageCopies
from engine.kv_cache.kv import HostPool, KVPool, swap_in, swap_out
from engine.offload.saves import TierCopier

_Bytes = NDArray[np.uint8]


class Copier(TierCopier, Protocol):
    """Copies pages, see PageCopier."""

    notify: Callable[[], None]

    def close(self) -> None: ...


class PageCopier:
    """Copies pages in both directions. The caller holds the pages on both sides until a copy is
    done.

    Attributes:
        notify: called from a thread of the copier when a copy is done.
    """

    def __init__(self, pool: KVPool, host_pool: HostPool) -> None:
        self.notify: Callable[[], None] = lambda: None
        self._copy_out, self._copy_in = _copies(pool, host_pool)
        self._saving = ThreadPoolExecutor(1, "save-pages")
        self._loading = ThreadPoolExecutor(1, "load-pages")

    def save(self, copies: PageCopies) -> Future[None]:
        """Copy device[i] -> host[i], after all earlier copies in this direction."""
        return self._noted(self._saving.submit(self._copy_out, copies))

    def load(self, copies: PageCopies) -> Future[None]:
        """Copy host[i] -> device[i], after all earlier copies in this direction."""
        return self._noted(self._loading.submit(self._copy_in, copies))

    def close(self) -> None:
        """Wait for copies in progress, and cancel queued ones."""
        for thread in (self._saving, self._loading):
            thread.shutdown(cancel_futures=True)

    def _noted(self, copy: Future[None]) -> Future[None]:
        copy.add_done_callback(lambda _: self.notify())
        return copy


def _copies(
    pool: KVPool, host_pool: HostPool
) -> tuple[Callable[[PageCopies], None], Callable[[PageCopies], None]]:
    """Return the functions that copy from device to host and back. Both return when a copy is
    done."""
    device = pool.tensor.device
    if device.type == "cpu":
        # Copies by numpy, because the threads of torch would take cores from the computation.
        here, there = pool.tensor.numpy(), host_pool.tensor.numpy()
        return (
            lambda copies: _copy_runs(here, copies.device_pages, there, copies.host_pages),
            lambda copies: _copy_runs(there, copies.host_pages, here, copies.device_pages),
        )
    return (
        _on_a_stream(device, lambda copies: swap_out(pool, host_pool, copies)),
        _on_a_stream(device, lambda copies: swap_in(pool, host_pool, copies)),
    )


def _on_a_stream(
    device: torch.device, copy: Callable[[PageCopies], None]
) -> Callable[[PageCopies], None]:
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def work(copies: PageCopies) -> None:
        with torch.cuda.stream(stream):
            copy(copies)
        stream.synchronize()

    return work


def _copy_runs(source: _Bytes, source_pages: Ints, target: _Bytes, target_pages: Ints) -> None:
    """Copy runs of pages that are consecutive on both sides. The GIL is free between two runs."""
    breaks = np.flatnonzero((np.diff(source_pages) != 1) | (np.diff(target_pages) != 1)) + 1
    for start, end in pairwise([0, *breaks.tolist(), len(source_pages)]):
        first, into = int(source_pages[start]), int(target_pages[start])
        target[into : into + end - start] = source[first : first + end - start]
