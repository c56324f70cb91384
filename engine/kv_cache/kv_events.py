"""KV cache events: pages that were added to or removed from the prefix cache, for its subscribers.

    PrefixCache --stored, removed--> CacheEvents --take--> subscribers, once a step
    PrefixCache --stored, removed--> KvEventLog --take--> payloads, once a step

Without a subscriber nothing is recorded, and the cost is one check for None. The name of a page
identifies the prefix that ends with it (common/requests/namespace.py).

KvEventLog creates events in vLLM's schema, for the routers of llm-d and Dynamo. Each struct is a
msgpack array that begins with the name of its type. A block is a page, and its hash is the name of
the page, a uint64. An evicted page is reported only if no offload tier has it.

Source: `vllm/distributed/kv_events.py` of vLLM 0.20.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from common.requests.namespace import SHARED, Namespace
from engine.batch.batch import Ints

# Maximum changes kept for one `take`. Beyond this limit, the next event lists all pages.
MAX_RECORDED = 1 << 16


class StoredRun(NamedTuple):
    """Consecutive pages of a prefix in the cache.

    Attributes:
        names: names of the pages. The cache changes this list later.
        tokens: [len(names) * page_size], their token ids.
        parent: name of the page before them. None: they begin a prompt.
    """

    names: Sequence[int]
    tokens: Ints
    parent: int | None
    namespace: Namespace


class CacheRecorder(Protocol):
    """Receives the changes of a cache, in order. Engine thread only."""

    def stored(self, run: StoredRun) -> None: ...

    def removed(self, pages: Iterable[int]) -> None: ...


class CacheChange(NamedTuple):
    """All changes since the previous event, as unordered, disjoint sets."""

    cleared: bool  # earlier events are void
    stored: Sequence[int]
    removed: Sequence[int]


class RecordedChange(Protocol):
    """The prefix cache, as this module uses it."""

    @property
    def page_size(self) -> int: ...

    def record_in(self, journal: CacheRecorder | None) -> None:
        """Record every change from now on in `journal`."""
        ...

    def page_names(self) -> list[int]:
        """Return the names of all pages in the cache. Only valid while it records changes."""
        ...


class CacheEvents:
    """The net changes of one cache since the last `take`, bounded. They can be started and stopped.
    Engine thread only."""

    def __init__(self, cache: RecordedChange, max_pages: int = MAX_RECORDED) -> None:
        self.page_size = cache.page_size
        self._cache = cache
        self._max_pages = max_pages
        self._is_stored: dict[int, bool] = {}  # by page
        self._complete = True  # False: all pages must be listed again

    def start(self) -> None:
        """Start recording. Computes the name of every page in the cache: about 25 ms per 100,000
        pages."""
        self._clear()
        self._cache.record_in(self)

    def stop(self) -> None:
        self._cache.record_in(None)
        self._clear()

    def everything(self) -> CacheChange:
        """Return all pages that are in the cache now, for a new subscriber."""
        return CacheChange(True, self._cache.page_names(), ())

    def take(self) -> CacheChange | None:
        """Return the changes since the last call, or None if there are none."""
        if not self._complete:
            self._clear()
            return self.everything()
        if not self._is_stored:
            return None
        changes, self._is_stored = self._is_stored, {}
        stored = [page for page, is_stored in changes.items() if is_stored]
        removed = [page for page, is_stored in changes.items() if not is_stored]
        return CacheChange(False, stored, removed)

    def stored(self, run: StoredRun) -> None:
        self._note(dict.fromkeys(run.names, True))

    def removed(self, pages: Iterable[int]) -> None:
        self._note(dict.fromkeys(pages, False))

    def _note(self, changes: dict[int, bool]) -> None:
        if self._complete:
            self._is_stored.update(changes)
            if len(self._is_stored) > self._max_pages:
                self._is_stored, self._complete = {}, False

    def _clear(self) -> None:
        self._is_stored, self._complete = {}, True


# Limits a payload, so that the frames that a slow subscriber has not read are bounded.
MAX_TOKENS_PER_BATCH = 1 << 14
# Maximum changed pages between two calls of `take`. Beyond this limit, all pages are listed again.
MAX_PAGES = 1 << 16
MEDIUM = "GPU"  # vLLM's word for the pool that requests use, even on CPUs


class BlockStored(msgspec.Struct, array_like=True, gc=False, tag=True):
    """Consecutive blocks of a prefix.

    Attributes:
        extra_keys: one per block. The first one is a private namespace, in hexadecimal, if these
            blocks begin a prompt in it. vLLM has the cache salt here.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str] | None] | None = None


class BlockRemoved(msgspec.Struct, array_like=True, gc=False, tag=True):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, array_like=True, gc=False, tag=True):
    """All blocks stored before are removed."""


class KVEventBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float  # seconds since the epoch
    events: list[Any]
    data_parallel_rank: int | None = None


class ListedChange(RecordedChange, Protocol):
    """A prefix cache that lists its content with the token ids."""

    def runs(self) -> Iterable[StoredRun]: ...


class KvEventLog:
    """The events of one cache since the last `take`. Engine thread only.

    The log is between the cache and the subscribers of CacheEvents, and has the interface of the
    cache.

    Args:
        adapter_of: returns the name of the LoRA adapter of a shared namespace, "" for the base
            model, and None for a private namespace.
        rank: rank of this node in its data-parallel group.
    """

    def __init__(
        self,
        cache: ListedChange,
        adapter_of: Callable[[Namespace], str | None],
        rank: int,
        max_pages: int = MAX_PAGES,
    ) -> None:
        self.page_size = cache.page_size
        self._cache = cache
        self._adapter_of = adapter_of
        self._rank = rank
        self._max_pages = max_pages
        self._next: CacheRecorder | None = None
        self._events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        self._num_pages = 0
        self._complete = False  # False: all pages must be listed again
        self._encoder = msgspec.msgpack.Encoder()
        cache.record_in(self)

    def stored(self, run: StoredRun) -> None:
        if self._count(len(run.names)):
            self._events += self._blocks(run)
        if self._next is not None:
            self._next.stored(run)

    def removed(self, pages: Iterable[int]) -> None:
        gone = list(pages)
        if gone and self._count(len(gone)):
            last = self._events[-1] if self._events else None
            if isinstance(last, BlockRemoved):
                last.block_hashes += gone
            else:
                self._events.append(BlockRemoved(gone, MEDIUM))
        if self._next is not None:
            self._next.removed(gone)

    def record_in(self, journal: CacheRecorder | None) -> None:
        """Record every change from now on, in `journal` as well."""
        self._next = journal

    def page_names(self) -> list[int]:
        return self._cache.page_names()

    def take(self) -> Iterator[bytes]:
        """Yield the events since the last call as payloads of KVEventBatch."""
        if not self._complete:
            self._complete = True
            everything = (block for run in self._cache.runs() for block in self._blocks(run))
            self._events = [AllBlocksCleared(), *everything]
        events, self._events, self._num_pages = self._events, [], 0
        now = time.time()
        for batch in _batches(events):
            yield self._encoder.encode(KVEventBatch(now, batch, self._rank))

    def _count(self, num_pages: int) -> bool:
        """Count changes. Return whether they must be recorded."""
        self._num_pages += num_pages
        if self._num_pages > self._max_pages:
            self._complete = False
            self._events.clear()
        return self._complete

    def _blocks(self, run: StoredRun) -> Iterator[BlockStored]:
        size, parent = self.page_size, run.parent
        most = max(1, MAX_TOKENS_PER_BATCH // size)
        adapter, salt = ("", None) if run.namespace == SHARED else self._known(run.namespace)
        for start in range(0, len(run.names), most):
            names = list(run.names[start : start + most])
            tokens = run.tokens[start * size : (start + len(names)) * size].tolist()
            block = BlockStored(names, parent, tokens, size, None, MEDIUM, adapter or None)
            if salt is not None and parent is None:
                block.extra_keys = [(salt,), *[None] * (len(names) - 1)]
            yield block
            parent = names[-1]

    def _known(self, namespace: Namespace) -> tuple[str, str | None]:
        """Return the adapter of a namespace, and its salt if it is private."""
        adapter = self._adapter_of(namespace)
        return ("", namespace.hex()) if adapter is None else (adapter, None)


def _batches(
    events: Iterable[BlockStored | BlockRemoved | AllBlocksCleared],
) -> Iterator[list[BlockStored | BlockRemoved | AllBlocksCleared]]:
    """Split events into batches of at most MAX_TOKENS_PER_BATCH tokens, or one event."""
    batch: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
    num_tokens = 0
    for event in events:
        size = len(event.token_ids) if isinstance(event, BlockStored) else 0
        if batch and num_tokens + size > MAX_TOKENS_PER_BATCH:
            yield batch
            batch, num_tokens = [], 0
        batch.append(event)
        num_tokens += size
    if batch:
        yield batch
