"""Copies in progress between device and host memory, and the pages held for them on both sides
(COPY)."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.batch.batch import Ints, PageCopies
from engine.kv_cache.pages import PageAllocator, PageHolder
from engine.offload.host_cache import HostCache, HostPages


class TierCopy(Protocol):
    @property
    def done(self) -> bool:
        """Return whether the copy is done. Raise the error of a failed copy."""
        ...


class TierCopier(Protocol):
    """A copier of pages in parallel to the steps. Saves run in order, and so do loads."""

    def save(self, copies: PageCopies) -> TierCopy: ...

    def bring(self, copies: PageCopies) -> TierCopy: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    copy: TierCopy
    device: Ints
    host: Ints
    kept: Sequence[HostPages]
    then: Callable[[], None]


class TierCopies:
    """The copies of one direction, first in, first out. Engine thread only."""

    def __init__(self, host: HostCache, pages: PageAllocator) -> None:
        self._host = host
        self._pages = pages
        self._jobs: deque[_Job] = deque()

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def add(
        self, copy: TierCopy, device: Ints, kept: Sequence[HostPages], then: Callable[[], None]
    ) -> None:
        """Add a copy that has begun.

        Args:
            device: pages that are already held for it; they are dropped when it is done.
            kept: entries that it writes or reads. They stay in host memory with all their
                pages.
            then: called when it is done, before anything is dropped.
        """
        self._jobs.append(_Job(copy, device, self._host.pin(kept), kept, then))

    def poll(self) -> None:
        """Finish the copies that are done.

        Raises:
            Exception: the error of a failed copy.
        """
        while self._jobs and self._jobs[0].copy.done:
            job = self._jobs.popleft()
            job.then()
            self._pages.drop(job.device, PageHolder.COPY)
            self._host.unpin(job.kept, job.host)

    def device_pages(self) -> Iterator[Ints]:
        """Yield the device pages, one array per hold."""
        return (job.device for job in self._jobs)

    def host_pages(self) -> Iterator[Ints]:
        return (job.host for job in self._jobs)
