"""The index of an offload tier: its entries by key (radix_nodes.py), least recently used first.

It does not know the places of a tier. These are pages of host memory, or slots of files.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from engine.batch.holding import NO_PAGE
from engine.kv_cache.radix_nodes import PageKey


@dataclass(slots=True, eq=False)
class TierEntry:
    """The KV of one page of tokens in a tier.

    Attributes:
        name: name by which routers know the page.
        places: host pages or slots, by table, then those of the state after it, if one is kept.
            NO_PAGE where absent.
        in_tree: whether the prefix tree has it, too.
        uses: copies, reads and writes in progress. The entry is not evicted before they end.
        writes: those among them that write the entry. It is incomplete until they end.
        from_file: whether it was read from a file and not loaded to the device since.
    """

    name: int
    places: list[int]
    in_tree: bool
    uses: int = 0
    writes: int = 0
    from_file: bool = False

    def present(self) -> list[int]:
        return [place for place in self.places if place != NO_PAGE]


KeyedEntry: TypeAlias = tuple[PageKey, TierEntry]


class TierIndex:
    """The entries of one tier. Engine thread only.

    Args:
        width: places per entry.
    Attributes:
        num_evicted: entries evicted since the start.
    """

    def __init__(self, width: int) -> None:
        self.num_evicted = 0
        self.width = width
        self._entries: OrderedDict[PageKey, TierEntry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: PageKey) -> bool:
        return key in self._entries

    @property
    def entries(self) -> Collection[TierEntry]:
        """Return all entries, least recently used first."""
        return self._entries.values()

    def get(self, key: PageKey) -> TierEntry | None:
        return self._entries.get(key)

    def newest_names(self, most: int) -> Iterator[int]:
        """Yield the names of the most recently used entries, at most `most`."""
        return (entry.name for entry in islice(reversed(self._entries.values()), most))

    def add(self, key: PageKey, name: int, *, in_tree: bool) -> TierEntry:
        """Return the entry of this key. It is created without places if it does not exist."""
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = TierEntry(name, [NO_PAGE] * self.width, in_tree)
        return entry

    def touch(self, key: PageKey) -> TierEntry | None:
        """Return the entry of this key, which is used now."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def evict(self, num_places: int, freed: Callable[[TierEntry], int]) -> list[KeyedEntry] | None:
        """Remove unused entries until they free `num_places` places. Return them, or None, without
        any change, if that is impossible.

        Args:
            freed: returns how many of the places an entry frees.
        """
        gone: list[KeyedEntry] = []
        for key, entry in self._entries.items():
            if num_places <= 0:
                break
            if not entry.uses:
                gone.append((key, entry))
                num_places -= freed(entry)
        if num_places > 0:
            return None
        self.num_evicted += len(gone)
        return self.remove([key for key, _ in gone])

    def remove(self, keys: Collection[PageKey]) -> list[KeyedEntry]:
        """Remove and return the entries of these keys, if they are here."""
        return [(key, self._entries.pop(key)) for key in keys if key in self._entries]

    def clear(self) -> list[KeyedEntry]:
        """Remove and return all entries."""
        gone = list(self._entries.items())
        self._entries.clear()
        return gone
