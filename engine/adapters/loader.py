"""Loading and unloading of adapters at runtime. Another thread reads files one after the other, and
the engine adds the results between two steps."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from common.errors import Overloaded, ServingError
from common.requests.adapter import AdapterId
from engine.adapters.library import AdapterCache
from engine.adapters.shelf import AdapterDirectory
from engine.adapters.stored import LoraAdapter

MAX_LOADING = 4  # at once, including the one that is being read


@dataclass(frozen=True, slots=True, eq=False)
class _Loading:
    name: str
    read: Future[LoraAdapter]
    loaded: Future[tuple[AdapterId, bool]]


class AdapterLoader:
    """The adapter loader. Engine thread only.

    Attributes:
        tell: called by another thread when `poll` has work.
    """

    def __init__(self, shelf: AdapterDirectory, library: AdapterCache) -> None:
        self._shelf = shelf
        self._library = library
        self._reader = ThreadPoolExecutor(1, "adapters")
        self._loading: list[_Loading] = []
        self.tell: Callable[[], None] = lambda: None

    def names(self) -> Mapping[str, AdapterId]:
        """All names that requests may use."""
        return self._library.names()

    def load(self, name: str, path: str) -> Future[tuple[AdapterId, bool]]:
        """Load an adapter. A later `poll` completes the future.

        Returns:
            The adapter, and whether the name is new. Or a ServingError of AdapterDirectory.read or
            AdapterCache.add.
        Raises:
            Overloaded: too many adapters are being loaded.
        """
        if len(self._loading) >= MAX_LOADING:
            raise Overloaded(f"{len(self._loading)} adapters are already loading")
        read = self._reader.submit(self._shelf.read, path)
        loaded: Future[tuple[AdapterId, bool]] = Future()
        self._loading.append(_Loading(name, read, loaded))
        read.add_done_callback(lambda _: self.tell())
        return loaded

    def unload(self, name: str) -> bool:
        """Unload a name. Running requests keep the adapter. Return whether the name existed."""
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
        """Stop loading."""
        self._reader.shutdown(wait=False, cancel_futures=True)
