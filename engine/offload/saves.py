"""Saves of inserted pages to host memory, and copies in progress between device and host memory.

Pages are copied as soon as they are inserted, a few at a time and concurrently with steps, so that
eviction never waits for a copy. A copy holds its pages on both sides (COPY).

If a prompt is longer than host memory, only its beginning is saved, from which other requests can
continue. If the rest were saved too, both parts would evict each other forever.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from engine.batch.batch import Ints, PageCopies
from engine.batch.holding import NO_PAGE
from engine.kv_cache.pages import PageAllocator, PageHolder
from engine.kv_cache.radix_nodes import PageKey, RadixNode
from engine.offload.file_tier import FileTier
from engine.offload.host_cache import HostCache
from engine.offload.tier_index import TierEntry


class TierCopier(Protocol):
    """Copies pages concurrently with steps. Saves run in order, and so do loads."""

    def save(self, copies: PageCopies) -> Future[None]: ...

    def load(self, copies: PageCopies) -> Future[None]: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    copy: Future[None]
    device: Ints
    host: Ints
    kept: Sequence[TierEntry]
    then: Callable[[], None]


class TierCopies:
    """The copies in one direction, first in, first out. Engine thread only."""

    def __init__(self, host: HostCache, pages: PageAllocator) -> None:
        self._host = host
        self._pages = pages
        self._jobs: deque[_Job] = deque()

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def add(
        self, copy: Future[None], device: Ints, kept: Sequence[TierEntry], then: Callable[[], None]
    ) -> None:
        """Add a copy that has begun.

        Args:
            device: device pages that are held for it. They are dropped when it is done.
            kept: entries that it writes or reads. They stay in host memory with all their pages.
            then: called when it is done, before any page is dropped.
        """
        self._jobs.append(_Job(copy, device, self._host.pin(kept), kept, then))

    def poll(self) -> None:
        """Finish the copies that are done.

        Raises:
            Exception: the error of a failed copy. It is fatal.
        """
        while self._jobs and self._jobs[0].copy.done():
            job = self._jobs.popleft()
            job.copy.result()
            job.then()
            self._pages.drop(job.device, PageHolder.COPY)
            self._host.unpin(job.kept, job.host)

    def device_pages(self) -> Iterator[Ints]:
        """Yield the device pages of all copies, one array per hold."""
        return (job.device for job in self._jobs)

    def host_pages(self) -> Iterator[Ints]:
        return (job.host for job in self._jobs)


SAVING_SHARE = 16  # at most 1 / SAVING_SHARE of either memory is being saved,
LEAST_SAVING = 8  # but at least this number of pages,
MOST_SAVING = 128  # and at most this many: larger saves delay the engine thread's step
MAX_BEHIND = 1024  # limit of queued nodes. Beyond it the oldest are not saved
# Used pages are marked as used again once 1 / SLACK_SHARE of the keys may have been evicted.
SLACK_SHARE = 8


class _Lacking(NamedTuple):
    """The pages of one page of tokens that are not in host memory: device pages by place in
    TierEntry.places."""

    key: PageKey
    name: int
    pages: dict[int, int]


class TierSaves:
    """Saves the pages of the prefix tree. Engine thread only.

    Attributes:
        num_pages: pages saved since the start.
    Args:
        files: the tier that writes saved pages to files, if any.
    """

    def __init__(
        self,
        host: HostCache,
        pages: PageAllocator,
        copier: TierCopier,
        files: FileTier | None,
    ) -> None:
        self._host = host
        self._pages = pages
        self._copier = copier
        self._width = host.index.width
        self._files = files
        self.copies = TierCopies(host, pages)
        self.num_pages = 0
        self._num_saving = 0
        self._behind: dict[RadixNode, None] = {}  # inserted nodes that are not completely saved

    def pages_added(self, node: RadixNode) -> None:
        """Save the pages from the start of a prompt to the end of the node that are not in host
        memory. Saves beyond the limit are queued."""
        # Mark the deepest nodes first, so that they are evicted first.
        for each in (node, *node.above()):
            if not self._is_settled(each):
                self._host.touch(reversed(each.keys))
        self._save_path(node)

    def _save_path(self, node: RadixNode) -> bool:
        """Save the pages of a node and of all nodes above that are not in host memory, from the
        root down. Return False if the limit was reached, and queue the node."""
        room, places = self._room_to_save(), self._room_of_all()
        lacking: list[_Lacking] = []
        for each in (*reversed([*node.above()]), node):
            needed = _pages_up_to(each)
            past = int(np.searchsorted(needed, places, side="right"))
            places -= int(needed[-1])
            if self._is_settled(each):
                continue
            for one in self._lacking(each, past):
                room -= len(one.pages)
                if room < 0:
                    self._save(lacking)
                    self._behind[node] = None
                    if len(self._behind) > MAX_BEHIND:
                        del self._behind[next(iter(self._behind))]
                    return False
                lacking.append(one)
            if places < 0:
                break
        self._save(lacking)
        return True

    def poll(self) -> None:
        """Finish the copies that are done, and start queued saves."""
        self.copies.poll()
        # Save nothing while requests use all of host memory.
        while self._behind and not self._num_saving and self._host.pages.num_available:
            node = next(iter(self._behind))
            if node.parent is None or self._save_path(node):
                del self._behind[node]

    def clear(self) -> None:
        """Drop all queued nodes, because the tree is being emptied."""
        self._behind.clear()

    def _is_settled(self, node: RadixNode) -> bool:
        """Return whether the whole node was recently in host memory, and marked as used."""
        return node.num_saved == node.num_pages and self._is_recent(node)

    def _is_recent(self, node: RadixNode) -> bool:
        """Return whether few keys were evicted since the node was last checked."""
        slack = len(self._host.index) // SLACK_SHARE
        return self._host.index.num_evicted - node.settled_at <= slack

    def _room_to_save(self) -> int:
        smaller = min(self._pages.num_pages, self._host.pages.num_pages)
        most = min(max(smaller // SAVING_SHARE, LEAST_SAVING), MOST_SAVING)
        most = max(most, self._width)
        return min(most - self._num_saving, self._host.pages.num_available)

    def _room_of_all(self) -> int:
        """Return the number of host pages that can store pages of the tree."""
        return self._host.pages.num_available + self._num_saving

    def _lacking(self, node: RadixNode, end: int) -> Iterator[_Lacking]:
        """Yield the node's pages before `end` that are not in host memory, in order. Updates the
        number of saved pages, so the caller must save each of them."""
        if not self._is_recent(node):
            node.num_saved, node.settled_at = 0, self._host.index.num_evicted
        while (first := node.num_saved) < end:
            past = min(first + MOST_SAVING, end)
            columns = node.pages[:, first:past].T.tolist()
            if past == node.num_pages:
                columns[-1] += node.state.tolist()
            for at, column in enumerate(columns, first):
                kept = self._host.index.get(node.keys[at])
                pages = {
                    place: page
                    for place, page in enumerate(column)
                    if page != NO_PAGE and (kept is None or kept.places[place] == NO_PAGE)
                }
                if pages:
                    yield _Lacking(node.keys[at], node.names[at], pages)
                node.num_saved = at + 1

    def _save(self, lacking: Sequence[_Lacking]) -> None:
        device = np.array([page for one in lacking for page in one.pages.values()], np.int32)
        if not len(device):
            return
        host = self._host.allocate(len(device), PageHolder.CACHE)
        assert host is not None  # free pages were counted before
        self._pages.hold(device, PageHolder.COPY)
        numbers = host.tolist()
        deepest_first = lacking[::-1]  # deepest first, so that they are evicted first
        saved: list[TierEntry] = []
        for one in deepest_first:
            kept = self._host.index.add(one.key, one.name, in_tree=True)
            for place in reversed(one.pages):
                kept.places[place] = numbers.pop()
            kept.writes += 1
            saved.append(kept)
        self._num_saving += len(device)
        copy = self._copier.save(PageCopies(device, host))
        keys = [one.key for one in deepest_first]
        self.copies.add(copy, device, saved, lambda: self._landed(keys, saved, device))

    def _landed(self, keys: Sequence[PageKey], saved: Sequence[TierEntry], device: Ints) -> None:
        self._num_saving -= len(device)
        self.num_pages += len(device)
        for kept in saved:
            kept.writes -= 1
        if self._files is not None:
            self._files.saved(keys)


def _pages_up_to(node: RadixNode) -> Ints:
    """Return the cumulative number of pages of all tables per page of tokens. The last entry
    includes state pages."""
    counts = np.count_nonzero(node.pages != NO_PAGE, axis=0)
    counts[-1] += len(node.state)
    return np.cumsum(counts, dtype=np.int32)
