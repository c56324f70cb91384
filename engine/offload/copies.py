"""Copies between the device and host memory that are under way, and what is held until they are
over: pages for COPY, on either side.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.batch.batch import Ints, PageCopies
from engine.kv_cache.pages import Holder, PageAllocator
from engine.offload.host_cache import HostCache, HostPages


class Copy(Protocol):
    @property
    def done(self) -> bool:
        """Raises what the copy raised."""
        ...


class Copier(Protocol):
    """Copies pages beside the steps. Saves are done in their order, and so are brings."""

    def save(self, copies: PageCopies) -> Copy: ...

    def bring(self, copies: PageCopies) -> Copy: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    copy: Copy
    device: Ints
    host: Ints
    kept: Sequence[HostPages]
    then: Callable[[], None]


class Copies:
    """In one direction, first in, first out. Engine thread only."""

    def __init__(self, host: HostCache, pages: PageAllocator) -> None:
        self._host = host
        self._pages = pages
        self._jobs: deque[_Job] = deque()

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def add(
        self, copy: Copy, device: Ints, kept: Sequence[HostPages], then: Callable[[], None]
    ) -> None:
        """One that has begun.

        Args:
            device: pages that are held for it already; they are dropped when it is over.
            kept: what it writes or reads: it stays where it is, with all pages that go with it.
            then: called when it is over, before anything is dropped.
        """
        self._jobs.append(_Job(copy, device, self._host.pin(kept), kept, then))

    def poll(self) -> None:
        """Takes up those that are over.

        Raises:
            Exception: what a copy raised.
        """
        while self._jobs and self._jobs[0].copy.done:
            job = self._jobs.popleft()
            job.then()
            self._pages.drop(job.device, Holder.COPY)
            self._host.unpin(job.kept, job.host)

    def device_pages(self) -> Iterator[Ints]:
        """An array for each hold."""
        return (job.device for job in self._jobs)

    def host_pages(self) -> Iterator[Ints]:
        return (job.host for job in self._jobs)
