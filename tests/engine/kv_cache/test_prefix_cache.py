"""The tree of cached prefixes: prefixes that a prompt finds, and the order of eviction."""

import inspect
import random
import sys
import tracemalloc

import numpy as np
import pytest

from common.requests.namespace import SHARED, namespace_of
from engine.batch.holding import PageHolding
from engine.kv_cache.pages import PageAllocator, PageHolder
from engine.kv_cache.radix import PrefixCache
from tests.support.engine.engine_rig import ints
from tests.support.engine.lifo_pages import LifoFreeList

SIZE = 4
ONE, OTHER = namespace_of("one"), namespace_of("other")


class Books:
    """A cache of pages of 4 tokens, and requests that compute and end."""

    def __init__(self, num_pages: int = 64, *, enabled: bool = True, max_pages: int = 0) -> None:
        self.pages = PageAllocator(num_pages, LifoFreeList)
        self.cache = PrefixCache(SIZE, self.pages, enabled=enabled, max_pages=max_pages)

    def begin(self, tokens: list[int], namespace=SHARED):
        """Return a request's pages: its cached prefix, held, and fresh ones. None: there are too
        few."""
        prefix = self.cache.match(ints(tokens), namespace)
        self.pages.hold(prefix.pages, PageHolder.REQUEST)
        fresh = self.cache.allocate(-(-len(tokens) // SIZE) - len(prefix.pages), PageHolder.REQUEST)
        if fresh is None:
            self.pages.drop(prefix.pages, PageHolder.REQUEST)
            return None
        return np.concatenate([prefix.pages, fresh])

    def end(self, tokens: list[int], pages, namespace=SHARED) -> None:
        assert pages is not None
        self.cache.insert(ints(tokens), PageHolding.of(pages), namespace)
        self.pages.drop(pages, PageHolder.REQUEST)
        self.check()

    def learn(self, tokens: list[int], namespace=SHARED):
        pages = self.begin(tokens, namespace)
        self.end(tokens, pages, namespace)
        return pages

    def check(self) -> None:
        self.cache.check()
        self.pages.check()


def test_a_prefix_is_found_in_whole_pages_only():
    books = Books()
    pages = books.learn(list(range(10)))
    match = books.cache.match(ints(range(11)))
    assert (match.num_tokens, match.pages.tolist()) == (8, pages[:2].tolist())
    assert books.cache.match(ints([0, 1, 2, 3, 4, 5, 6])).num_tokens == 4
    assert books.cache.match(ints([9, 1, 2, 3])).num_tokens == 0
    assert books.cache.match(ints([])).num_tokens == 0


def test_prefixes_that_diverge_in_the_middle_of_a_node_share_its_beginning():
    books = Books()
    one = books.learn([*range(8), 20, 21, 22, 23])
    two = books.learn([*range(8), 30, 31, 32, 33])
    assert one[:2].tolist() == two[:2].tolist()
    assert books.cache.num_pages == 4
    for last, pages in ((20, one), (30, two)):
        match = books.cache.match(ints([*range(8), *range(last, last + 4)]))
        assert match.pages.tolist() == pages.tolist()


def test_duplicates_of_cached_pages_are_freed_when_their_request_ends():
    books = Books()
    tokens = list(range(8))
    first = books.begin(tokens)
    second = books.begin(tokens)
    books.end(tokens, first)
    books.end(tokens, second)
    assert books.cache.match(ints(tokens)).pages.tolist() == first.tolist()
    assert books.pages.num_free == 62


def test_pages_of_a_request_are_not_evicted():
    books = Books(num_pages=4)
    held = books.begin(list(range(8)))
    books.cache.insert(ints(range(8)), PageHolding.of(held))
    books.learn([50, 51, 52, 53])
    assert books.cache.evict(4) == 1
    assert books.cache.match(ints(range(8))).num_tokens == 8
    books.check()


def test_the_least_recently_used_leaf_is_evicted_first_from_its_end():
    books = Books()
    books.learn([1] * 8)
    books.learn([2] * 8)
    books.cache.match(ints([1] * 8))
    assert books.cache.evict(1) == 1
    assert len(books.cache.lineage(ints([2] * 8))) == 1
    assert books.cache.evict(2) == 2
    assert books.cache.match(ints([2] * 8)).num_tokens == 0
    assert books.cache.match(ints([1] * 8)).num_tokens == 4
    books.check()


def test_a_branch_can_be_evicted_after_its_leaves():
    books = Books()
    books.learn([*[1] * 8, *[2] * 4])
    books.learn([*[1] * 8, *[3] * 4])
    assert books.cache.evict(4) == 4
    assert books.cache.num_pages == 0
    books.check()


def test_all_evictable_pages_are_available_even_above_one_in_use():
    """A request that computed a duplicate of a cached prefix, and continued from there, holds
    the end of a path whose beginning it does not hold."""
    books = Books(num_pages=8)
    prefix, longer = [1] * 8, [1] * 16
    late = books.begin(longer)
    books.end(prefix, books.begin(prefix))
    books.cache.insert(ints(longer), PageHolding.of(late))
    assert books.pages.num_evictable == 2
    assert books.cache.allocate(4, PageHolder.READ) is not None
    books.cache.check()
    books.pages.drop(late, PageHolder.REQUEST)
    books.check()


def test_a_failed_allocation_evicts_nothing():
    books = Books(num_pages=4)
    books.learn([1] * 8)
    assert books.cache.allocate(5, PageHolder.REQUEST) is None
    assert books.cache.num_pages == 2


def test_a_flush_frees_everything():
    books = Books()
    for i in range(5):
        books.learn([*[1] * 4, *[i] * 8])
    held = books.begin([1] * 4)
    assert books.cache.flush() == 10
    assert books.cache.num_pages == 0
    books.pages.drop(held, PageHolder.REQUEST)
    assert books.pages.num_free == 64
    books.check()


def test_a_disabled_cache_inserts_nothing():
    books = Books(enabled=False)
    books.learn([1] * 8)
    assert books.cache.match(ints([1] * 8)).num_tokens == 0
    assert books.pages.num_free == 64


def test_the_lineage_names_the_nodes_of_a_path():
    books = Books()
    books.learn([*[1] * 8, *[2] * 4])
    books.learn([*[1] * 8, *[3] * 4])
    two, three = (books.cache.lineage(ints([*[1] * 8, *[i] * 4])) for i in (2, 3))
    assert len(two) == len(three) == 2
    assert two[0] == three[0] and two[1] != three[1]
    assert books.cache.lineage(ints([9] * 8)) == ()


def test_a_conversation_of_many_turns_may_make_a_tree_deeper_than_the_stack():
    turns = 300
    books = Books(num_pages=turns)
    tokens = [turn for turn in range(turns) for _ in range(SIZE)]
    pages = books.begin(tokens)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + turns // 2)
    try:
        for num_pages in range(1, turns + 1):
            books.cache.insert(ints(tokens[: num_pages * SIZE]), PageHolding.of(pages))
        books.end(tokens, pages)
        assert len(books.cache.lineage(ints(tokens))) == turns
        assert books.cache.evict(100) == 100
        books.check()
        assert books.cache.flush() == turns - 100
    finally:
        sys.setrecursionlimit(limit)


def test_a_namespace_finds_only_its_own_prefixes():
    books = Books()
    tokens = list(range(12))
    pages = {namespace: books.learn(tokens, namespace) for namespace in (SHARED, ONE, OTHER)}
    assert books.cache.num_pages == 9
    for namespace, own in pages.items():
        assert books.cache.match(ints(tokens), namespace).pages.tolist() == own.tolist()
    assert books.cache.match(ints(tokens), namespace_of("a third")).num_tokens == 0
    assert books.cache.lineage(ints(tokens), namespace_of("a third")) == ()


def test_tokens_equal_to_the_key_of_a_namespace_do_not_enter_it():
    """Its 16 bytes are those of four tokens."""
    books = Books()
    books.learn([1] * 8, ONE)
    spelt = np.frombuffer(ONE, np.int32).tolist()
    assert books.cache.match(ints([*spelt, *[1] * 8])).num_tokens == 0


def test_the_least_recently_used_prefix_of_all_namespaces_is_evicted_first():
    books = Books(num_pages=6)
    for namespace in (ONE, SHARED, OTHER):
        books.learn([1] * 8, namespace)
    books.cache.match(ints([1] * 8), ONE)
    books.pages.drop(books.cache.allocate(3, PageHolder.REQUEST), PageHolder.REQUEST)
    books.check()
    left = [books.cache.match(ints([1] * 8), each).num_tokens for each in (ONE, SHARED, OTHER)]
    assert left == [8, 0, 4]


# Seen failing with a view of the caller's tokens in the tree.
def test_the_tree_keeps_no_array_of_its_caller():
    books = Books()
    tokens = ints([*range(8)])
    pages = books.begin([*range(8)])
    holding = PageHolding.of(pages.copy())
    books.cache.insert(tokens, holding)
    tokens[:], holding.tables[:] = 9, 0
    match = books.cache.match(ints([*range(8)]))
    assert (match.num_tokens, match.pages.tolist()) == (8, pages.tolist())
    books.pages.drop(pages, PageHolder.REQUEST)
    books.check()


# Seen failing if `insert` does not record the use.
def test_inserting_a_prefix_again_counts_as_use():
    books = Books()
    one, other = books.learn([1] * 8), books.learn([2] * 8)
    books.cache.insert(ints([1] * 8), PageHolding.of(one))
    assert books.cache.evict(2) == 2
    cached = books.pages.holds(PageHolder.CACHE)
    assert cached[one].all() and not cached[other].any()


# Seen failing if an eviction that skips it does not record the use.
def test_a_prefix_held_during_an_eviction_outlives_unused_ones():
    books = Books()
    held, first, second = (books.learn([n] * 8) for n in range(3))
    books.pages.hold(held, PageHolder.REQUEST)
    assert books.cache.evict(2) == 2
    books.pages.drop(held, PageHolder.REQUEST)
    assert books.cache.evict(2) == 2
    cached = books.pages.holds(PageHolder.CACHE)
    assert cached[held].all() and not cached[[*first, *second]].any()


def test_a_namespace_without_pages_takes_no_memory():
    """So a client that uses a new namespace for every request gets no memory beyond its pages."""
    books = Books(num_pages=4)
    for number in range(2000):
        if number == 1000:
            tracemalloc.start()
        books.pages.drop(books.begin([1] * 8, namespace_of(f"gone {number}")), PageHolder.REQUEST)
        tokens, namespace = [number] * 8, namespace_of(str(number))
        books.cache.insert(
            ints(tokens), PageHolding.of(pages := books.begin(tokens, namespace)), namespace
        )
        books.pages.drop(pages, PageHolder.REQUEST)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    books.check()
    assert grown < 20_000


@pytest.mark.parametrize("seed", range(10))
def test_every_match_holds_the_requested_tokens(seed):
    """Compared with a plain record of what was written to each page, and in which namespace."""
    rng = random.Random(seed)
    books = Books(num_pages=24)
    contents: dict[int, tuple[bytes, tuple[int, ...]]] = {}
    live: list[tuple[list[int], bytes, np.ndarray]] = []
    for _ in range(600):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
        namespace = rng.choice((SHARED, SHARED, ONE))
        match = books.cache.match(ints(tokens), namespace)
        assert match.num_tokens == len(match.pages) * SIZE <= len(tokens)
        for i, page in enumerate(match.pages.tolist()):
            assert contents[page] == (namespace, tuple(tokens[i * SIZE : (i + 1) * SIZE]))
        needed = -(-len(tokens) // SIZE) - len(match.pages)
        books.pages.hold(match.pages, PageHolder.REQUEST)
        possible = needed <= books.cache.num_available
        books.pages.drop(match.pages, PageHolder.REQUEST)
        pages = books.begin(tokens, namespace)
        assert (pages is not None) == possible
        if pages is not None:
            for i, page in enumerate(pages.tolist()):
                contents[page] = namespace, tuple(tokens[i * SIZE : (i + 1) * SIZE])
            live.append((tokens, namespace, pages))
        while live and (pages is None or rng.random() < 0.4):
            tokens, namespace, pages = live.pop(rng.randrange(len(live)))
            if rng.random() < 0.8:
                books.cache.insert(ints(tokens), PageHolding.of(pages), namespace)
            books.pages.drop(pages, PageHolder.REQUEST)
            if rng.random() < 0.5:
                break
        books.check()


# The size limit


def test_the_least_recently_used_prefixes_beyond_the_size_limit_are_evicted():
    books = Books(max_pages=6)
    prompts = [[number] * 8 for number in range(4)]
    for prompt in prompts[:3]:
        books.learn(prompt)
        books.cache.trim()
    assert books.cache.num_pages == 6
    books.cache.match(ints(prompts[0]))
    books.learn(prompts[3])
    books.cache.trim()
    books.check()
    assert [books.cache.match(ints(prompt)).num_tokens for prompt in prompts] == [8, 0, 8, 8]
    assert books.pages.num_free == 64 - 6


def test_pages_in_use_may_exceed_the_size_limit_until_they_are_released():
    books = Books(max_pages=2)
    idle, used = [1] * 8, [2] * 20
    books.learn(idle)
    pages = books.begin(used)
    books.cache.insert(ints(used), PageHolding.of(pages))
    books.cache.trim()
    assert [books.cache.match(ints(prompt)).num_tokens for prompt in (idle, used)] == [0, 20]
    books.pages.drop(pages, PageHolder.REQUEST)
    books.cache.trim()
    books.check()
    assert books.cache.match(ints(used)).num_tokens == 8


def test_the_size_limit_costs_work_only_for_evicted_pages_and_for_releases(monkeypatch):
    books = Books(max_pages=10)
    tried = []
    loose = books.cache._pages.loose_at_end
    monkeypatch.setattr(
        books.cache._pages, "loose_at_end", lambda node: (tried.append(node), loose(node))[1]
    )
    for number in range(30):
        books.learn([number] * 4)
    books.cache.trim()
    assert (len(tried), books.cache.num_pages) == (20, 10)
    # Requests with duplicates of a cached page: there are fewer pages in use than the limit, so it
    # stays.
    held = [books.pages.allocate(2, PageHolder.REQUEST) for _ in range(12)]
    for number, pages in enumerate(held):
        books.cache.insert(ints([29] * 4 + [number] * 4), PageHolding.of(pages))
    books.cache.trim()
    assert (books.pages.num_evictable, books.cache.num_pages) == (1, 13)
    tried.clear()
    books.cache.trim()
    assert tried == []
    books.pages.drop(held[0], PageHolder.REQUEST)
    books.cache.trim()
    books.check()
    assert (len(tried), books.cache.num_pages) == (12, 12)
