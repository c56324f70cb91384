"""Memory that an engine at rest can do without: given back to the system, and taken again.

In host memory addresses stay what they are, and with them all that others have noted of them: what
is read over process boundaries, and compiled code. Only what is there goes.
"""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from common.errors import WrongState
from common.memory_tags import KV_CACHE, WEIGHTS
from engine.kv_cache.pages import PageAllocator
from engine.sizing import free_bytes
from engine.update import WeightsUpdate
from kernels.cpu.memory import give_back


class Occupation:
    """Engine thread only.

    Args:
        pools: memory of `pages`, on the device and beside it.
        pinned: why it cannot be given back; "": it can.
        tell: called by another thread when something is done.
    """

    def __init__(
        self,
        weights: WeightsUpdate,
        pages: PageAllocator,
        pools: Sequence[Tensor],
        pinned: str,
        tell: Callable[[], None],
    ) -> None:
        self._weights = weights
        self._pages = pages
        self._tell = tell
        self._pools = pools
        self._pinned = pinned
        self._worker = ThreadPoolExecutor(1, "memory")

    @property
    def unused(self) -> bool:
        """Whether nobody holds a page. Not before may any memory be given back."""
        return self._pages.num_free == self._pages.num_pages

    def check(self, tags: Collection[str]) -> None:
        """Raises WrongState where one of them cannot be given back."""
        if KV_CACHE in tags and self._pinned:
            raise WrongState(f"{KV_CACHE}: {self._pinned}")
        if WEIGHTS in tags:
            self._weights.check_drainable()

    def give_back(self, tag: str) -> Future[Any]:
        """After `check`. Raises Overloaded where other weights are under way."""
        if tag == WEIGHTS:
            return self._weights.give_back()
        return self._begin(self._give_back_pools)

    def take_again(self, tag: str) -> Future[Any]:
        """Fails with WrongState, and nothing has changed: there is no room, or the weights are not
        to be had any more. Raises Overloaded as `give_back`."""
        if tag == WEIGHTS:
            return self._weights.bring_back()
        return self._begin(self._find_room)

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _begin(self, work: Callable[[], None]) -> Future[None]:
        future = self._worker.submit(work)
        future.add_done_callback(lambda _: self._tell())
        return future

    def _give_back_pools(self) -> None:
        for pool in self._pools:
            give_back(pool)

    def _find_room(self) -> None:
        """The system gives the memory page by page, as it is written."""
        wanted = sum(pool.nbytes for pool in self._pools)
        left = free_bytes(torch.device("cpu"), 1.0)
        if wanted > left:
            raise WrongState(
                f"{KV_CACHE}: {wanted / 2**30:.2f} GiB are wanted, {left / 2**30:.2f} GiB are left"
            )
