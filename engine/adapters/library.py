"""The adapters that a node has loaded in host memory, and loading of adapters while it serves.

The number and bytes of adapters are limited. To add one, the least recently used idle adapters are
evicted. An adapter stays until all requests have released it, even if its names are removed.
Adapters are read only below one directory that the operator configured. One thread reads files one
after the other, and the engine adds the results between two steps.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from common.errors import (
    AdapterNotLoaded,
    FailedPrecondition,
    InvalidRequest,
    Overloaded,
    ServingError,
)
from common.requests.namespace import AdapterId
from engine.adapters.stored import AdapterLimits, AdapterReader, LoraAdapter
from engine.models.checkpoint import below, refusing


class AdapterSource(Protocol):
    def read(self, path: str) -> LoraAdapter:
        """Read an adapter, see AdapterDirectory. Any thread."""
        ...


class AdapterDirectory:
    """A directory of adapters. For any thread.

    Args:
        directory: None: there is no directory, and no adapter can be read.
    """

    def __init__(self, directory: Path | None, reader: AdapterReader) -> None:
        self._directory = None if directory is None else directory.resolve()
        self._reader = reader

    def read(self, path: str) -> LoraAdapter:
        """Read an adapter.

        Args:
            path: path of a directory below this one, absolute or relative to it.
        Raises:
            InvalidRequest: the path is not below this directory, or has no adapter for this model.
        """
        root = self._directory
        if root is None:
            raise InvalidRequest("lora_path: this node has no engine.lora.adapter_dir")
        directory = below(root, path, "lora_path", "engine.lora.adapter_dir")
        with refusing("lora_path", f"{root}/"):
            return self._reader.read(directory)


def no_adapter_directory() -> AdapterDirectory:
    limits = AdapterLimits(0, 0)
    return AdapterDirectory(None, AdapterReader(products=(), limits=limits, dtype=torch.float32))


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
        self._loaded: dict[AdapterId, LoadedAdapter] = {}  # least recently used first
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
            FailedPrecondition: another adapter has this name.
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
        """Remove a name. Return whether it existed. Requests that hold the adapter keep it."""
        adapter = self.names().get(name)
        if adapter is None:
            return False
        self._loaded[adapter].names.remove(name)
        self._release(adapter)
        return True

    def hold(self, adapter: AdapterId) -> LoraAdapter:
        """Hold an adapter until `drop`.

        Raises:
            AdapterNotLoaded: the adapter is not loaded on this node. Another node may have it.
        """
        loaded = self._loaded.get(adapter)
        if loaded is None or not loaded.names:
            raise AdapterNotLoaded(f"adapter: {adapter.hex()} is not loaded on this node")
        self._loaded[adapter] = self._loaded.pop(adapter)
        loaded.holders += 1
        return loaded.adapter

    def drop(self, adapter: AdapterId) -> None:
        self._loaded[adapter].holders -= 1
        self._release(adapter)

    def _release(self, adapter: AdapterId) -> None:
        loaded = self._loaded[adapter]
        if not loaded.names and not loaded.holders:
            del self._loaded[adapter]

    def _make_room(self, num_bytes: int) -> None:
        """Evict idle adapters until `num_bytes`, at most the total limit, are free. Raise
        Overloaded if that is impossible."""
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


MAX_LOADING = 4  # limit of queued loads, including the current one


@dataclass(frozen=True, slots=True, eq=False)
class _Loading:
    name: str
    read: Future[LoraAdapter]
    loaded: Future[tuple[AdapterId, bool]]


class AdapterLoader:
    """Loads adapters on another thread. Engine thread only.

    Attributes:
        notify: called by the other thread when `poll` has work.
    """

    def __init__(self, source: AdapterSource, library: AdapterCache) -> None:
        self._source = source
        self._library = library
        self._reader = ThreadPoolExecutor(1, "adapters")
        self._loading: list[_Loading] = []
        self.notify: Callable[[], None] = lambda: None

    def names(self) -> Mapping[str, AdapterId]:
        return self._library.names()

    def load(self, name: str, path: str) -> Future[tuple[AdapterId, bool]]:
        """Load an adapter. A later `poll` completes the future.

        Returns:
            A future of the adapter, and of whether the name is new. Or of a ServingError of
                AdapterDirectory.read or AdapterCache.add.
        Raises:
            Overloaded: too many adapters are being loaded.
        """
        if len(self._loading) >= MAX_LOADING:
            raise Overloaded(f"{len(self._loading)} adapters are already loading")
        read = self._reader.submit(self._source.read, path)
        loaded: Future[tuple[AdapterId, bool]] = Future()
        self._loading.append(_Loading(name, read, loaded))
        read.add_done_callback(lambda _: self.notify())
        return loaded

    def unload(self, name: str) -> bool:
        """Unload a name. Return whether it existed. Running requests keep the adapter."""
        return self._library.remove(name)

    def poll(self) -> None:
        """Add the adapters that have been read."""
        done = [each for each in self._loading if each.read.done()]
        for each in done:
            self._loading.remove(each)
            try:
                adapter = each.read.result()
                each.loaded.set_result((adapter.id, self._library.add(each.name, adapter)))
            except ServingError as error:
                each.loaded.set_exception(error)

    def close(self) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)
