"""Watchers of the prefix cache always know its content, through all of its operations."""

import random

import numpy as np
import pytest

from common.requests.namespace import (
    SHARED,
    Namespace,
    PrefixHasher,
    as_bytes,
    namespace_of,
    page_names,
)
from engine.kv_cache.kv_events import CacheChange, CacheEvents
from tests.engine.kv_cache.test_prefix_cache import SIZE, Books
from tests.support.engine.engine_rig import ints


class Watched(Books):
    """A cache under random use, and its watcher."""

    def __init__(self, seed: int, *, num_pages: int = 48, max_untold: int = 1 << 16) -> None:
        super().__init__(num_pages)
        self.random = random.Random(seed)
        self.events = CacheEvents(self.cache, max_untold)
        self.known: set[int] = set()
        self.num_cleared = 0
        self._live: list[tuple[list[int], Namespace, np.ndarray]] = []
        self._prompts: set[tuple[tuple[int, ...], Namespace]] = set()

    def hear(self, change: CacheChange | None) -> None:
        if change is None:
            return
        if change.cleared:
            self.num_cleared += 1
            self.known.clear()
        assert not set(change.stored) & set(change.removed)
        self.known -= set(change.removed)
        self.known |= set(change.stored)

    def start(self) -> None:
        self.events.start()
        self.hear(self.events.everything())

    def check_known(self) -> None:
        """Check that the watcher knows the content of the cache after the latest changes."""
        self.hear(self.events.take())
        assert self.known == self.truth()

    def use_many(self, most: int) -> None:
        for _ in range(self.random.randrange(most)):
            self.use()

    def use(self) -> None:
        """Run a random operation of the cache."""
        match self.random.randrange(8):
            case 0 if self._live:
                self._end(self.random.randrange(len(self._live)))
            case 1:
                self.cache.evict(self.random.randrange(12))
            case 2 if not self.random.randrange(6):
                while self._live:
                    self._end(0)
                self.cache.flush()
            case 3 if self._prompts and not self.random.randrange(3):
                tokens, namespace = self.random.choice(sorted(self._prompts))
                self.cache.forget(ints(tokens), namespace)
                assert not self.cache.match(ints(tokens), namespace).num_tokens
                self.cache.check()
            case _:
                self._begin()

    def truth(self) -> set[int]:
        """Return the content by asking the cache for every prompt ever used."""
        pages = set()
        for prompt, namespace in self._prompts:
            cached = self.cache.match(ints(prompt), namespace).num_tokens
            pages |= set(page_names(prompt[:cached], SIZE, namespace))
        assert len(pages) == self.cache.num_pages
        return pages

    def _begin(self) -> None:
        # Few different tokens, so prompts share prefixes and diverge in the middle of nodes.
        tokens = [self.random.randrange(2) for _ in range(self.random.randrange(1, 40))]
        namespace = self.random.choice((SHARED, SHARED, namespace_of("theirs")))
        pages = self.begin(tokens, namespace)
        if pages is not None:
            self._live.append((tokens, namespace, pages))
            self._prompts.add((tuple(tokens), namespace))

    def _end(self, number: int) -> None:
        tokens, namespace, pages = self._live.pop(number)
        self.end(tokens, pages, namespace)


@pytest.mark.parametrize("seed", range(20))
def test_a_watcher_knows_exactly_the_pages_of_the_tree(seed):
    watched = Watched(seed)
    for _ in range(100):  # unwatched for a while
        watched.use()
    watched.start()
    for _ in range(60):
        watched.use_many(8)
        watched.check_known()
    assert watched.num_cleared == 1


def test_after_more_changes_than_are_kept_everything_is_listed_again():
    watched = Watched(1, num_pages=400, max_untold=10)
    watched.start()
    for _ in range(40):
        watched.use_many(12)
        watched.check_known()
    assert watched.num_cleared > 3


def test_a_watcher_that_returns_gets_the_changes_in_between():
    watched = Watched(2)
    for _ in range(5):
        watched.start()
        assert watched.known == watched.truth()
        watched.use()
        watched.check_known()
        watched.events.stop()
        for _ in range(20):
            watched.use()
        assert watched.events.take() is None


def test_a_page_that_was_added_and_removed_between_two_reads_is_reported_as_removed():
    watched = Watched(3)
    watched.events.start()
    watched.learn(list(range(SIZE)))
    watched.cache.flush()
    gone = page_names(range(SIZE), SIZE)
    assert watched.events.take() == CacheChange(False, [], gone)
    assert watched.events.take() is None


def test_names_of_prefixes_are_the_same_everywhere():
    tokens = list(range(1, 13))
    names = page_names(tokens, SIZE)
    assert page_names(tokens[:11], SIZE) == names[:2]
    assert not set(page_names([9, *tokens[1:]], SIZE)) & set(names)
    assert page_names(tokens, 2 * SIZE) == names[1:2]
    assert as_bytes(tokens) == ints(tokens).tobytes()
    assert PrefixHasher(as_bytes(tokens[:4])).extend(as_bytes(tokens[4:]), SIZE) == names[1:]
    # Recorded once, because machines of different versions must agree.
    assert [f"{name:016x}" for name in names] == [
        "6fc1ebd4f4d6ea31",
        "f4c3a04d9a059938",
        "f2a8c2975a6b57e6",
    ]
    theirs = page_names(tokens, SIZE, namespace_of("salt"))
    begun = PrefixHasher(namespace_of("salt") + as_bytes(tokens[:4]))
    assert begun.extend(as_bytes(tokens[4:]), SIZE) == theirs[1:]
    assert namespace_of("salt").hex() == "a3cc46fdee49357b2fd2431c4f09dea5"
    assert f"{theirs[0]:016x}" == "920f0b4ecbbfc750"
