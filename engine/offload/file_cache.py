"""Which pages are in files, below host memory: found by key like those there (host_cache.py), each
in a slot (page_files.py).

Of what is there that goes first which was written or used longest ago. Whoever reads or writes a
page has it stay. Knows nothing of how that is done.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from common.errors import EngineFault
from engine.batch.holding import NO_PAGE
from engine.kv_cache.page_keys import PageKey
from engine.offload.page_records import Record

MOST_NAMED = 1 << 17  # of which watchers hear at once: half of what a router keeps of a node


@dataclass(slots=True, eq=False)
class FiledPages:
    """The KV of one page of tokens.

    Attributes:
        name: what routers know it by.
        slots: by place, as HostPages.pages; NO_PAGE where none has it.
        in_tree: the prefix tree has it too.
        uses: reads and writes under way; until they are over it stays.
        writes: of these; until they are over it is not all there.
    """

    name: int
    slots: list[int]
    in_tree: bool = False
    uses: int = 0
    writes: int = 0

    def present(self) -> list[int]:
        return [slot for slot in self.slots if slot != NO_PAGE]


class FileCache:
    """Engine thread only.

    Attributes:
        num_slots: constant.
        num_evicted: keys that went to make room, since the start.
    """

    def __init__(
        self, num_slots: int, width: int, found: Iterable[tuple[int, Record]] = ()
    ) -> None:
        """
        Args:
            width: places of a page of tokens.
            found: slots that are filled from before; of two with one page the newer one counts.
        """
        self.num_slots = num_slots
        self.num_evicted = 0
        self._limit = num_slots  # slots from there on are given to nobody
        self._width = width
        self._kept: OrderedDict[PageKey, FiledPages] = OrderedDict()  # used longest ago first
        self._free: list[int] = []  # that have been used; those from _fresh on never were
        self._fresh = 0
        self._withheld: list[int] = []  # free, and behind the limit
        self._order = 0
        self._leaving: list[FiledPages] = []  # removed, and used still
        self._recover(found)

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: PageKey) -> bool:
        return key in self._kept

    @property
    def num_filled(self) -> int:
        """Slots that have a page."""
        return self._fresh - len(self._free) - len(self._withheld)

    def get(self, key: PageKey) -> FiledPages | None:
        return self._kept.get(key)

    def touch(self, key: PageKey) -> None:
        """The tree has it, and somebody uses it now."""
        filed = self._kept.get(key)
        if filed is not None:
            filed.in_tree = True
            self._kept.move_to_end(key)

    def allocate(self, num_slots: int) -> tuple[list[int], list[tuple[PageKey, FiledPages]]] | None:
        """So many slots, and what went to make room for them. None: there are not so many."""
        gone = self._evict(num_slots - max(0, self._limit - self._fresh) - len(self._free))
        if gone is None:
            return None
        slots = [self._free.pop() for _ in range(min(num_slots, len(self._free)))]
        past = self._fresh + num_slots - len(slots)
        slots += range(self._fresh, past)
        self._fresh = past
        return slots, gone

    def limit_to(self, num_slots: int) -> None:
        """The disk has no room for others than the first ones, so many."""
        self._limit = min(self._limit, num_slots)
        free, self._free = self._free, []
        self._release(free)

    def lift_limit(self) -> None:
        """It may have room again."""
        self._limit = self.num_slots
        self._free += self._withheld
        self._withheld.clear()

    def use(self, filed: FiledPages) -> None:
        """Somebody reads or writes it."""
        filed.uses += 1

    def let_go(self, filed: FiledPages) -> None:
        """That is over."""
        filed.uses -= 1
        if not filed.uses and filed in self._leaving:
            self._leaving.remove(filed)
            self._release(filed.present())

    def next_order(self) -> int:
        """Of the next record."""
        self._order += 1
        return self._order

    def add(self, key: PageKey, name: int, *, in_tree: bool) -> FiledPages:
        """What is kept under a key, from now on."""
        filed = self._kept.get(key)
        if filed is None:
            filed = self._kept[key] = FiledPages(name, [NO_PAGE] * self._width, in_tree)
        return filed

    def remove(self, key: PageKey) -> None:
        """It is not there any more; its slots are free once nobody uses it."""
        filed = self._kept.pop(key)
        if filed.uses:
            self._leaving.append(filed)
        else:
            self._release(filed.present())

    def left_tree(self, keys: Sequence[PageKey]) -> None:
        """The tree has forgotten these."""
        for key in keys:
            filed = self._kept.get(key)
            if filed is not None:
                filed.in_tree = False

    def names(self) -> Iterator[int]:
        """Of those that were used last, MOST_NAMED at most."""
        return (kept.name for kept in islice(reversed(self._kept.values()), MOST_NAMED))

    def clear(self) -> list[tuple[PageKey, FiledPages]]:
        """Forgets everything, and that any slot was ever used, or is; returns what there was."""
        gone = list(self._kept.items())
        self._kept.clear()
        self._leaving.clear()
        self._free.clear()
        self._withheld.clear()
        self._fresh = 0
        return gone

    def check(self) -> None:
        """Raises EngineFault where a slot is nobody's, or two have it. O(slots)."""
        mine = [s for each in (*self._kept.values(), *self._leaving) for s in each.present()]
        free = [*self._free, *self._withheld]
        if sorted([*mine, *free]) != list(range(self._fresh)):
            raise EngineFault(
                f"files: {len(mine)} slots have pages, {len(free)} are free, of {self._fresh} that "
                "have been used"
            )

    def _evict(self, num_slots: int) -> list[tuple[PageKey, FiledPages]] | None:
        """So many slots become free, or nothing changes."""
        gone: list[tuple[PageKey, FiledPages]] = []
        for key, filed in self._kept.items():
            if num_slots <= 0:
                break
            if not filed.uses:
                gone.append((key, filed))
                num_slots -= sum(slot < self._limit for slot in filed.present())
        if num_slots > 0:
            return None
        for key, _ in gone:
            self.remove(key)
        self.num_evicted += len(gone)
        return gone

    def _release(self, slots: Iterable[int]) -> None:
        for slot in slots:
            (self._free if slot < self._limit else self._withheld).append(slot)

    def _recover(self, found: Iterable[tuple[int, Record]]) -> None:
        filled = set()
        for slot, record in sorted(found, key=lambda each: -each[1].order):
            self._order = max(self._order, record.order)
            if record.width == self._width and record.place < self._width:
                filed = self.add(record.key, record.name, in_tree=False)
                if filed.slots[record.place] == NO_PAGE:
                    filed.slots[record.place] = slot
                    filled.add(slot)
        for key in list(reversed(self._kept)):
            self._kept.move_to_end(key)
        self._fresh = max(filled, default=-1) + 1
        self._free = [slot for slot in range(self._fresh) if slot not in filled]
