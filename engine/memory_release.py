"""Release of the memory of a paused engine to the system, and its reallocation.

In host memory the addresses do not change. Everything that refers to them stays valid, such as
reads across process boundaries and compiled code. Only the contents are lost.
"""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

from common.errors import FailedPrecondition
from common.pausing import KV_CACHE, WEIGHTS
from engine.kv_cache.pages import PageAllocator
from engine.sizing import free_bytes
from engine.update import WeightUpdater
from kernels.cpu.memory import give_back

_RANKS_S = 60.0  # for the other ranks


class OtherPools(Protocol):
    """The pages of the other ranks."""

    @property
    def ranks_per_host(self) -> int:
        """Number of ranks of this node on this host."""
        ...

    def release(self) -> Future[Any]:
        """Return their memory to the system."""
        ...


class MemoryOccupation:
    """The releasable memory of an engine. Engine thread only.

    Args:
        pools: memory of `pages`, on the device and in host memory.
        pinned: reason why it cannot be released; "": it can.
        notify: called by another thread when an operation is done.
        others: None: this process has all pages.
    """

    def __init__(
        self,
        weights: WeightUpdater,
        pages: PageAllocator,
        pools: Sequence[Tensor],
        pinned: str,
        notify: Callable[[], None],
        others: OtherPools | None = None,
    ) -> None:
        self._others = others
        self._weights = weights
        self._pages = pages
        self._notify = notify
        self._pools = pools
        self._pinned = pinned
        self._worker = ThreadPoolExecutor(1, "memory")

    @property
    def unused(self) -> bool:
        """Return whether no page is held. Memory may be released only then."""
        return self._pages.num_free == self._pages.num_pages

    def check(self, tags: Collection[str]) -> None:
        """Raise FailedPrecondition if the memory of one of these tags cannot be released."""
        if KV_CACHE in tags and self._pinned:
            raise FailedPrecondition(f"{KV_CACHE}: {self._pinned}")
        if WEIGHTS in tags:
            self._weights.check_drainable()

    def give_back(self, tag: str) -> Future[Any]:
        """Release the memory. Requires `check`. Raise Overloaded while a weight update is in
        progress."""
        if tag == WEIGHTS:
            return self._weights.give_back()
        return self._begin(self._give_back_pools)

    def take_again(self, tag: str) -> Future[Any]:
        """Reallocate the memory. The future fails with FailedPrecondition, without any change, if
        there is not enough memory or the weights are no longer available. Raise Overloaded as
        `give_back` does."""
        if tag == WEIGHTS:
            return self._weights.bring_back()
        return self._begin(self._find_room)

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _begin(self, work: Callable[[], None]) -> Future[None]:
        future = self._worker.submit(work)
        future.add_done_callback(lambda _: self._notify())
        return future

    def _give_back_pools(self) -> None:
        others = None if self._others is None else self._others.release()
        for pool in self._pools:
            give_back(pool)
        if others is not None:
            others.result(_RANKS_S)

    def _find_room(self) -> None:
        """Only check the free memory: the system allocates each page when it is written."""
        num_ranks = 1 if self._others is None else self._others.ranks_per_host
        wanted = num_ranks * sum(pool.nbytes for pool in self._pools)
        left = free_bytes(torch.device("cpu"), 1.0)
        if wanted > left:
            raise FailedPrecondition(
                f"{KV_CACHE}: {wanted / 2**30:.2f} GiB are wanted, {left / 2**30:.2f} GiB are left"
            )
