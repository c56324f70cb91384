"""Pages that the prefix tree learns, on their way to the tier below: copied at once, beside the
steps, a few at a time. So what is evicted has been copied before, and eviction waits for nothing.
Of a prompt that is longer than host memory its beginning is saved, which is what others can go on
from: the rest would only take its place, and it the rest's, for ever.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from engine.batch.batch import Ints, PageCopies
from engine.batch.holding import NO_PAGE
from engine.kv_cache.page_keys import PageKey
from engine.kv_cache.pages import Holder, PageAllocator
from engine.kv_cache.radix_nodes import Node
from engine.offload.copies import Copier, Copies
from engine.offload.host_cache import HostCache, HostPages

SAVING_SHARE = 16  # no more than this part of either memory is being saved at once,
LEAST_SAVING = 8  # or so many pages,
MOST_SAVING = 128  # and never more: what it takes the engine thread holds up a step
MAX_BEHIND = 1024  # nodes that wait to be saved; of more those that have waited longest are not
SLACK_SHARE = 8  # of the keys: so many may go until what is used is marked as used anew


class _Lacking(NamedTuple):
    """What is not below of one page of tokens: pages on the device by place in HostPages.pages."""

    key: PageKey
    name: int
    pages: dict[int, int]


class Saves:
    """Engine thread only.

    Attributes:
        copies: that are under way.
        num_pages: saved since the start.
    Args:
        width: pages of one page of tokens, see HostPages.
        saved: told which keys host memory has more of.
    """

    def __init__(
        self,
        host: HostCache,
        pages: PageAllocator,
        copier: Copier,
        *,
        width: int,
        saved: Callable[[Sequence[PageKey]], None],
    ) -> None:
        self._host = host
        self._pages = pages
        self._copier = copier
        self._width = width
        self._saved = saved
        self.copies = Copies(host, pages)
        self.num_pages = 0
        self._num_saving = 0
        self._behind: dict[Node, None] = {}  # learnt, and not all of it is being saved yet

    def learnt(self, node: Node) -> None:
        """It has these pages, from the first of a prompt to the last of the node. What is not below
        yet is saved, when it is its turn."""
        for each in (node, *node.above()):  # what is deepest is forgotten first
            if not self._is_settled(each):
                self._host.touch(reversed(each.keys))
        self._save_path(node)

    def _save_path(self, node: Node) -> bool:
        """Saves what is not below of a node and of those above, first things first. False: there is
        no room for now; its turn will come."""
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
        """Goes on with what has waited for its turn."""
        self.copies.poll()
        # Not while requests have all of host memory.
        while self._behind and not self._num_saving and self._host.num_available:
            node = next(iter(self._behind))
            if node.parent is None or self._save_path(node):
                del self._behind[node]

    def clear(self) -> None:
        """The tree is emptied."""
        self._behind.clear()

    def _is_settled(self, node: Node) -> bool:
        """Everything of it was below not long ago, and marked as used."""
        return node.num_saved == node.num_pages and self._is_recent(node)

    def _is_recent(self, node: Node) -> bool:
        """What was noted of it is still so, for the most part."""
        slack = len(self._host) // SLACK_SHARE
        return self._host.num_evicted - node.settled_at <= slack

    def _room_to_save(self) -> int:
        smaller = min(self._pages.num_pages, self._host.pages.num_pages)
        most = min(max(smaller // SAVING_SHARE, LEAST_SAVING), MOST_SAVING)
        most = max(most, self._width)
        return min(most - self._num_saving, self._host.num_available)

    def _room_of_all(self) -> int:
        """Host pages that may have what the tree has."""
        return self._host.num_available + self._num_saving

    def _lacking(self, node: Node, end: int) -> Iterator[_Lacking]:
        """Of the node's pages before `end` those that are not below, the first ones first. Notes
        how many pages are, or are going to be: whoever takes one saves it."""
        if not self._is_recent(node):
            node.num_saved, node.settled_at = 0, self._host.num_evicted
        while (first := node.num_saved) < end:
            past = min(first + MOST_SAVING, end)
            columns = node.pages[:, first:past].T.tolist()
            if past == node.num_pages:
                columns[-1] += node.state.tolist()
            for at, column in enumerate(columns, first):
                kept = self._host.get(node.keys[at])
                pages = {
                    place: page
                    for place, page in enumerate(column)
                    if page != NO_PAGE and (kept is None or kept.pages[place] == NO_PAGE)
                }
                if pages:
                    yield _Lacking(node.keys[at], node.names[at], pages)
                node.num_saved = at + 1

    def _save(self, lacking: Sequence[_Lacking]) -> None:
        device = np.array([page for one in lacking for page in one.pages.values()], np.int32)
        if not len(device):
            return
        host = self._host.allocate(len(device), Holder.CACHE)
        assert host is not None  # room was looked at before
        self._pages.hold(device, Holder.COPY)
        numbers = host.tolist()
        deepest_first = lacking[::-1]  # what is deepest is forgotten first
        saved: list[HostPages] = []
        for one in deepest_first:
            kept = self._host.add(one.key, one.name, self._width)
            for place in reversed(one.pages):
                kept.pages[place] = numbers.pop()
            kept.saves += 1
            saved.append(kept)
        self._num_saving += len(device)
        copy = self._copier.save(PageCopies(device, host))
        keys = [one.key for one in deepest_first]
        self.copies.add(copy, device, saved, lambda: self._landed(keys, saved, device))

    def _landed(self, keys: Sequence[PageKey], saved: Sequence[HostPages], device: Ints) -> None:
        self._num_saving -= len(device)
        self.num_pages += len(device)
        for kept in saved:
            kept.saves -= 1
        self._saved(keys)


def _pages_up_to(node: Node) -> Ints:
    """How many pages of all tables the node has up to each of its pages of tokens, and with its
    state, which goes with the last."""
    counts = np.count_nonzero(node.pages != NO_PAGE, axis=0)
    counts[-1] += len(node.state)
    return np.cumsum(counts, dtype=np.int32)
