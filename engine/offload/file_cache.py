"""The index of pages in files, below host memory, and the record of each page in a file.

Entries are found by key as in host_cache.py. Each page is in a slot (page_files.py). The least
recently written or used entries are evicted first, but not while a read or write uses them. This
module does not read or write files.

A record has 64 bytes, including checksums of the record and of the page. A later process can
therefore verify the files instead of trusting them.

    index:  header | record of slot 0 | record of slot 1 | ...
    pages:  page of slot 0 | page of slot 1 | ...

A page is written before its record. After an interrupted write, one of the two checksums is
therefore wrong.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from struct import Struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from common.errors import EngineFault
from engine.batch.holding import NO_PAGE
from engine.kv_cache.radix_nodes import KEY_BYTES, PageKey

FORMAT = 1
HEADER_BYTES = 4096
VERSION_BYTES = 16
_HEADER = Struct(f"<16s{VERSION_BYTES}sQ")
_BODY = Struct(f"<{KEY_BYTES}sQQQHH12x")
_SUM = Struct("<Q")
RECORD_BYTES = _SUM.size + _BODY.size


class PageRecord(NamedTuple):
    """The record of one page.

    Attributes:
        key, name, place: identify the page, see HostPages.
        order: the newer of two records has the larger number.
        width: number of places per page of tokens.
    """

    key: PageKey
    name: int
    order: int
    checksum: int
    place: int
    width: int


def checksum(page: memoryview) -> int:
    return xxh3_64_intdigest(page)


def version_of(fingerprint: Mapping[str, str], weights: bytes) -> bytes:
    """Return the version of pages: a digest of everything on which their content depends.

    Args:
        fingerprint: the fingerprint of an engine, by field.
        weights: the id of the content of all weights.
    """
    digest = hashlib.blake2b(digest_size=VERSION_BYTES, person=b"baton files KV")
    for field in (
        f"{FORMAT}",
        weights.hex(),
        *(f"{name}={fingerprint[name]}" for name in sorted(fingerprint)),
    ):
        digest.update(f"{len(field)}:{field}".encode())
    return digest.digest()


def header(version: bytes, page_bytes: int) -> bytes:
    return _HEADER.pack(b"baton pages", version, page_bytes).ljust(HEADER_BYTES, b"\0")


def packed(record: PageRecord, slot: int) -> bytes:
    body = _BODY.pack(*record)
    return _SUM.pack(xxh3_64_intdigest(body, seed=slot)) + body


def record_of(data: bytes) -> PageRecord:
    """Return a record from the bytes of `packed`, without verifying its checksum."""
    return PageRecord(*_BODY.unpack(data[_SUM.size :]))


def unpacked(index: bytes) -> Iterator[tuple[int, PageRecord]]:
    """Yield slots and records of an index without its header. Invalid records are left out."""
    for slot, at in enumerate(range(0, len(index) - RECORD_BYTES + 1, RECORD_BYTES)):
        body = index[at + _SUM.size : at + RECORD_BYTES]
        (expected,) = _SUM.unpack_from(index, at)
        if expected and expected == xxh3_64_intdigest(body, seed=slot):
            yield slot, PageRecord(*_BODY.unpack(body))


MOST_NAMED = 1 << 17  # names reported to subscribers at once: half of a router's limit per node


@dataclass(slots=True, eq=False)
class FiledPages:
    """The KV of one page of tokens, in files.

    Attributes:
        name: name by which routers know the page.
        slots: by place, like HostPages.pages. NO_PAGE where no slot has it.
        in_tree: whether the prefix tree has it, too.
        uses: reads and writes in progress. The entry is not evicted before they end.
        writes: the writes among them. The entry is incomplete until they end.
    """

    name: int
    slots: list[int]
    in_tree: bool = False
    uses: int = 0
    writes: int = 0

    def present(self) -> list[int]:
        return [slot for slot in self.slots if slot != NO_PAGE]


class FileCache:
    """The index of the files. Engine thread only.

    Attributes:
        num_slots: number of slots, constant.
        num_evicted: keys evicted since the start.
    """

    def __init__(
        self, num_slots: int, width: int, found: Iterable[tuple[int, PageRecord]] = ()
    ) -> None:
        """Create the index.

        Args:
            width: places per page of tokens.
            found: used slots of an earlier process. If two have the same page, the newer one
                counts.
        """
        self.num_slots = num_slots
        self.num_evicted = 0
        self._limit = num_slots  # slots from this one on are not allocated
        self._width = width
        self._kept: OrderedDict[PageKey, FiledPages] = OrderedDict()  # least recently used first
        self._free: list[int] = []  # slots that were used; slots from _fresh on were never used
        self._fresh = 0
        self._withheld: list[int] = []  # free slots beyond the limit
        self._order = 0
        self._leaving: list[FiledPages] = []  # removed entries that are still in use
        self._recover(found)

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: PageKey) -> bool:
        return key in self._kept

    @property
    def num_filled(self) -> int:
        """Number of slots with a page."""
        return self._fresh - len(self._free) - len(self._withheld)

    def get(self, key: PageKey) -> FiledPages | None:
        return self._kept.get(key)

    def touch(self, key: PageKey) -> None:
        """Record that the tree has the page, and that it was used now."""
        filed = self._kept.get(key)
        if filed is not None:
            filed.in_tree = True
            self._kept.move_to_end(key)

    def allocate(self, num_slots: int) -> tuple[list[int], list[tuple[PageKey, FiledPages]]] | None:
        """Return `num_slots` slots, and the entries evicted for them. Return None if there are not
        enough."""
        gone = self._evict(num_slots - max(0, self._limit - self._fresh) - len(self._free))
        if gone is None:
            return None
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
        self._limit = self.num_slots
        self._free += self._withheld
        self._withheld.clear()

    def use(self, filed: FiledPages) -> None:
        """Record that a read or write of the entry begins."""
        filed.uses += 1

    def release(self, filed: FiledPages) -> None:
        """Record that a read or write of the entry has ended."""
        filed.uses -= 1
        if not filed.uses and filed in self._leaving:
            self._leaving.remove(filed)
            self._release(filed.present())

    def next_order(self) -> int:
        """Return the order number of the next record."""
        self._order += 1
        return self._order

    def add(self, key: PageKey, name: int, *, in_tree: bool) -> FiledPages:
        """Return the entry of this key. It is created if it does not exist."""
        filed = self._kept.get(key)
        if filed is None:
            filed = self._kept[key] = FiledPages(name, [NO_PAGE] * self._width, in_tree)
        return filed

    def remove(self, key: PageKey) -> None:
        """Remove an entry. Its slots become free when no read or write uses it."""
        filed = self._kept.pop(key)
        if filed.uses:
            self._leaving.append(filed)
        else:
            self._release(filed.present())

    def left_tree(self, keys: Sequence[PageKey]) -> None:
        """Record that the tree has evicted these pages."""
        for key in keys:
            filed = self._kept.get(key)
            if filed is not None:
                filed.in_tree = False

    def names(self) -> Iterator[int]:
        """Return the names of the most recently used entries, at most MOST_NAMED."""
        return (kept.name for kept in islice(reversed(self._kept.values()), MOST_NAMED))

    def clear(self) -> list[tuple[PageKey, FiledPages]]:
        """Remove everything, and mark all slots as never used. Return the removed entries."""
        gone = list(self._kept.items())
        self._kept.clear()
        self._leaving.clear()
        self._free.clear()
        self._withheld.clear()
        self._fresh = 0
        return gone

    def check(self) -> None:
        """Raise EngineFault if a slot is lost or has two owners. O(slots)."""
        mine = [s for each in (*self._kept.values(), *self._leaving) for s in each.present()]
        free = [*self._free, *self._withheld]
        if sorted([*mine, *free]) != list(range(self._fresh)):
            raise EngineFault(
                f"files: {len(mine)} slots have pages, {len(free)} are free, of {self._fresh} that "
                "have been used"
            )

    def _evict(self, num_slots: int) -> list[tuple[PageKey, FiledPages]] | None:
        """Evict entries until `num_slots` more slots are free. Return None, without any change, if
        that is impossible."""
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

    def _recover(self, found: Iterable[tuple[int, PageRecord]]) -> None:
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
