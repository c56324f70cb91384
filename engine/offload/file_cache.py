"""The slots of the file tier. Each page of an entry is in a slot (page_files.py).

This module does not read or write files.
"""

from collections.abc import Collection, Iterable

from common.errors import EngineFault
from engine.kv_cache.radix_nodes import PageKey
from engine.offload.page_records import PageRecord
from engine.offload.tier_index import KeyedEntry, TierEntry, TierIndex


class FileCache:
    """The slots of the files, and the entries in them. Engine thread only.

    Attributes:
        index: the entries. Their places are slots.

    Args:
        found: used slots of an earlier process. If two have the same page, the newer one counts.
    """

    def __init__(
        self, num_slots: int, width: int, found: Iterable[tuple[int, PageRecord]] = ()
    ) -> None:
        self.index = TierIndex(width)
        self._num_slots = num_slots
        self._limit = num_slots  # slots from this one on are not allocated
        self._free: list[int] = []  # slots that were used. Slots from _fresh on were never used
        self._fresh = 0
        self._withheld: list[int] = []  # free slots beyond the limit
        self._order = 0
        self._leaving: list[TierEntry] = []  # removed entries that are still in use
        self._recover(found)

    @property
    def num_filled(self) -> int:
        """Number of slots with a page."""
        return self._fresh - len(self._free) - len(self._withheld)

    def allocate(self, num_slots: int) -> tuple[list[int], list[KeyedEntry]] | None:
        """Return `num_slots` slots, and the entries evicted for them. Return None if there are not
        enough."""
        short = num_slots - max(0, self._limit - self._fresh) - len(self._free)
        gone = self.index.evict(short, self._num_usable)
        if gone is None:
            return None
        self._release(slot for _, entry in gone for slot in entry.present())
        slots = [self._free.pop() for _ in range(min(num_slots, len(self._free)))]
        past = self._fresh + num_slots - len(slots)
        slots += range(self._fresh, past)
        self._fresh = past
        return slots, gone

    def limit_to(self, num_slots: int) -> None:
        """Allocate only the first `num_slots` slots from now on, because the disk is full."""
        self._limit = min(self._limit, num_slots)
        free, self._free = self._free, []
        self._release(free)

    def lift_limit(self) -> None:
        """Allow all slots again, since the disk may have space again."""
        self._limit = self._num_slots
        self._free += self._withheld
        self._withheld.clear()

    def release(self, entry: TierEntry) -> None:
        """Record that a read or write of the entry has ended."""
        entry.uses -= 1
        if not entry.uses and entry in self._leaving:
            self._leaving.remove(entry)
            self._release(entry.present())

    def next_order(self) -> int:
        self._order += 1
        return self._order

    def remove(self, keys: Collection[PageKey]) -> list[KeyedEntry]:
        """Remove and return the entries of these keys, if they are here. Their slots become free
        when no read or write uses them."""
        gone = self.index.remove(keys)
        for _, entry in gone:
            if entry.uses:
                self._leaving.append(entry)
            else:
                self._release(entry.present())
        return gone

    def clear(self) -> list[KeyedEntry]:
        """Remove everything, and mark all slots as never used. Return the removed entries."""
        self._leaving.clear()
        self._free.clear()
        self._withheld.clear()
        self._fresh = 0
        return self.index.clear()

    def check(self) -> None:
        """Raise EngineFault if a slot is lost or has two owners. O(slots)."""
        mine = [slot for each in (*self.index.entries, *self._leaving) for slot in each.present()]
        free = [*self._free, *self._withheld]
        if sorted([*mine, *free]) != list(range(self._fresh)):
            raise EngineFault(
                f"files: {len(mine)} slots have pages, {len(free)} are free, of {self._fresh} that "
                "have been used"
            )

    def _num_usable(self, entry: TierEntry) -> int:
        """Return the number of slots of an entry that may be allocated again."""
        return sum(slot < self._limit for slot in entry.present())

    def _release(self, slots: Iterable[int]) -> None:
        for slot in slots:
            (self._free if slot < self._limit else self._withheld).append(slot)

    def _recover(self, found: Iterable[tuple[int, PageRecord]]) -> None:
        for slot, record in sorted(found, key=lambda each: each[1].order):
            self._order = record.order
            if record.width == self.index.width and record.place < self.index.width:
                entry = self.index.add(record.key, record.name, in_tree=False)
                entry.places[record.place] = slot
                self.index.touch(record.key)
        filled = {slot for entry in self.index.entries for slot in entry.present()}
        self._fresh = max(filled, default=-1) + 1
        self._free = [slot for slot in range(self._fresh) if slot not in filled]
