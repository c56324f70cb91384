"""The adapters that a node has loaded in host memory, by name and by content.

Their number and bytes are limited. To add one, the least recently used idle ones are evicted. An
adapter held by a request stays until the request releases it, even if its names are removed.
"""

from dataclasses import dataclass, field

from common.errors import AdapterNotLoaded, FailedPrecondition, Overloaded
from common.requests.adapter import AdapterId
from engine.adapters.stored import LoraAdapter


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """A loaded adapter.

    Attributes:
        holders: number of requests that hold it.
    """

    adapter: LoraAdapter
    names: set[str] = field(default_factory=set)
    holders: int = 0


class AdapterCache:
    """The loaded adapters. Engine thread only."""

    def __init__(self, max_adapters: int, max_bytes: int) -> None:
        self._max_adapters = max_adapters
        self._max_bytes = max_bytes
        self._loaded: dict[AdapterId, LoadedAdapter] = {}  # the least recently used first
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._loaded)

    @property
    def num_bytes(self) -> int:
        return sum(each.adapter.num_bytes for each in self._loaded.values())

    def names(self) -> dict[str, AdapterId]:
        """Return all names that requests may use, with their adapters."""
        return {name: adapter for adapter, each in self._loaded.items() for name in each.names}

    def add(self, name: str, adapter: LoraAdapter) -> bool:
        """Add an adapter under a name. Return whether the name is new.

        Raises:
            FailedPrecondition: the name belongs to another adapter.
            Overloaded: the adapters in use leave no capacity for it.
        """
        has = self.names().get(name)
        if has not in (None, adapter.id):
            raise FailedPrecondition(
                f"adapter {name!r} is loaded with other content; unload it first"
            )
        if adapter.id not in self._loaded:
            self._make_room(adapter.num_bytes)
            self._loaded[adapter.id] = LoadedAdapter(adapter)
        self._loaded[adapter.id].names.add(name)
        return has is None

    def remove(self, name: str) -> bool:
        """Remove a name. Requests that hold the adapter keep it. Return whether the name
        existed."""
        adapter = self.names().get(name)
        if adapter is None:
            return False
        self._loaded[adapter].names.remove(name)
        self._let_go(adapter)
        return True

    def hold(self, adapter: AdapterId) -> LoraAdapter:
        """Hold an adapter until `drop`.

        Raises:
            AdapterNotLoaded: it is not loaded here. Another node may have it.
        """
        loaded = self._loaded.get(adapter)
        if loaded is None or not loaded.names:
            raise AdapterNotLoaded(f"adapter: {adapter.hex()} is not loaded on this node")
        self._loaded[adapter] = self._loaded.pop(adapter)
        loaded.holders += 1
        return loaded.adapter

    def drop(self, adapter: AdapterId) -> None:
        self._loaded[adapter].holders -= 1
        self._let_go(adapter)

    def _let_go(self, adapter: AdapterId) -> None:
        loaded = self._loaded[adapter]
        if not loaded.names and not loaded.holders:
            del self._loaded[adapter]

    def _make_room(self, num_bytes: int) -> None:
        """Evict idle adapters to make room for one of `num_bytes`, which is at most the total
        limit. Raises Overloaded if that is not enough."""
        idle = [adapter for adapter, loaded in self._loaded.items() if not loaded.holders]
        count, total = len(self._loaded), self.num_bytes
        evicted = []
        for adapter in idle:
            if count < self._max_adapters and total + num_bytes <= self._max_bytes:
                break
            evicted.append(adapter)
            count -= 1
            total -= self._loaded[adapter].adapter.num_bytes
        if count >= self._max_adapters or total + num_bytes > self._max_bytes:
            raise Overloaded(
                f"{len(self._loaded)} adapters of {self.num_bytes} bytes are loaded, and those in "
                f"use leave no room for another of {num_bytes} bytes"
            )
        for adapter in evicted:
            del self._loaded[adapter]
        self.num_evicted += len(evicted)
