import random
from collections import Counter

import numpy as np
import pytest

from common.errors import EngineFault
from engine.kv_cache.pages import PageAllocator, PageHolder
from tests.support.engine_rig import ints


def _allocate(pages: PageAllocator, num_pages: int, holder: PageHolder = PageHolder.REQUEST):
    taken = pages.allocate(num_pages, holder)
    assert taken is not None
    return taken


def test_a_page_is_free_again_only_when_its_last_holder_has_dropped_it():
    pages = PageAllocator(4)
    page = _allocate(pages, 1)
    for holder in (PageHolder.STEP, PageHolder.READ, PageHolder.PUBLICATION):
        pages.hold(page, holder)
    for holder in (PageHolder.REQUEST, PageHolder.STEP, PageHolder.READ):
        pages.drop(page, holder)
        assert pages.num_free == 3
    pages.drop(page, PageHolder.PUBLICATION)
    assert pages.num_free == 4
    pages.check()


def test_holds_of_one_kind_add_up():
    pages = PageAllocator(2)
    page = _allocate(pages, 1)
    pages.hold(page, PageHolder.REQUEST)
    pages.drop(page, PageHolder.REQUEST)
    assert pages.num_free == 1
    pages.drop(page, PageHolder.REQUEST)
    assert pages.num_free == 2


def test_allocation_is_all_or_nothing():
    pages = PageAllocator(4)
    _allocate(pages, 3)
    assert pages.allocate(2, PageHolder.READ) is None
    assert pages.num_free == 1
    assert len(_allocate(pages, 1)) == 1


def test_free_pages_are_given_out_in_ascending_runs():
    pages = PageAllocator(8)
    first, second = _allocate(pages, 3), _allocate(pages, 3)
    pages.drop(first, PageHolder.REQUEST)
    pages.drop(second, PageHolder.REQUEST)
    assert _allocate(pages, 8).tolist() == list(range(8))


def test_a_lifo_list_gives_out_first_what_was_freed_last():
    pages = PageAllocator(8, lifo=True)
    first = _allocate(pages, 3)
    second = _allocate(pages, 2)
    pages.drop(first, PageHolder.REQUEST)
    pages.drop(second, PageHolder.REQUEST)
    assert sorted(_allocate(pages, 2).tolist()) == sorted(second.tolist())


def test_evictable_are_the_pages_that_the_cache_alone_holds():
    pages = PageAllocator(4)
    taken = _allocate(pages, 3)
    pages.hold(taken[:2], PageHolder.CACHE)
    assert pages.num_evictable == 0
    pages.drop(taken, PageHolder.REQUEST)
    assert (pages.num_evictable, pages.num_free) == (2, 2)
    pages.hold(taken[:1], PageHolder.PUBLICATION)
    assert pages.num_evictable == 1
    assert pages.held_only_by(ints([0, 1, 2, 3]), PageHolder.CACHE).tolist() == [
        False,
        True,
        False,
        False,
    ]
    pages.drop(taken[1:2], PageHolder.CACHE)
    assert (pages.num_evictable, pages.num_free) == (0, 3)
    pages.check()


def test_a_page_that_the_cache_holds_twice_is_evictable_until_both_are_dropped():
    pages = PageAllocator(2)
    page = _allocate(pages, 1)
    pages.hold(page, PageHolder.CACHE)
    pages.drop(page, PageHolder.REQUEST)
    assert pages.num_evictable == 1
    pages.hold(page, PageHolder.CACHE)
    pages.check()
    assert pages.num_evictable == 1
    assert pages.held_only_by(page, PageHolder.CACHE).all()
    pages.hold(page, PageHolder.STEP)
    assert pages.num_evictable == 0
    pages.drop(page, PageHolder.CACHE)
    pages.drop(page, PageHolder.STEP)
    assert (pages.num_evictable, pages.num_free) == (1, 1)
    pages.drop(page, PageHolder.CACHE)
    assert (pages.num_evictable, pages.num_free) == (0, 2)
    pages.check()


def test_a_free_page_cannot_be_held():
    pages = PageAllocator(2)
    with pytest.raises(EngineFault, match="free"):
        pages.hold(ints([1]), PageHolder.STEP)


def test_what_is_not_held_cannot_be_dropped():
    pages = PageAllocator(2)
    page = _allocate(pages, 1)
    with pytest.raises(EngineFault, match="READ"):
        pages.drop(page, PageHolder.READ)


def test_pages_can_be_taken_off_the_free_list_by_number():
    for lifo in (False, True):
        pages = PageAllocator(6, lifo=lifo)
        held = _allocate(pages, 2)
        wanted = np.concatenate([held, ints([5, 3])])
        pages.hold_even_free(wanted, PageHolder.STEP)
        pages.check()
        assert pages.num_free == 2
        assert sorted(_allocate(pages, 2).tolist()) == [2, 4]


def test_the_release_count_moves_when_somebody_else_could_have_a_page():
    pages = PageAllocator(4)
    taken = _allocate(pages, 2)
    pages.hold(taken, PageHolder.STEP)
    before = pages.num_released
    pages.drop(taken, PageHolder.STEP)
    assert pages.num_released == before
    pages.drop(taken, PageHolder.REQUEST)
    assert pages.num_released == before + 2


def test_gauges_count_every_page_once_by_its_first_kind_of_holder():
    pages = PageAllocator(7)
    taken = _allocate(pages, 5)
    pages.hold(taken[:4], PageHolder.CACHE)
    pages.hold(taken[:1], PageHolder.STEP)
    pages.hold(taken[1:2], PageHolder.PUBLICATION)
    pages.drop(taken[1:3], PageHolder.REQUEST)
    held = {"free": 2, "request": 3, "step": 0, "read": 0, "publication": 1, "copy": 0, "cache": 1}
    assert pages.by_holder() == held
    assert pages.num_evictable == held["cache"]


@pytest.mark.parametrize("lifo", [False, True])
def test_the_books_agree_with_a_plain_count_over_random_holds(lifo):
    rng = random.Random(7)
    pages = PageAllocator(32, lifo=lifo)
    holds: list[tuple[int, PageHolder]] = []
    for _ in range(3000):
        holder = rng.choice(list(PageHolder))
        match rng.randrange(4):
            case 0:
                taken = pages.allocate(rng.randrange(5), holder)
                if taken is not None:
                    assert not {page for page, _ in holds} & set(taken.tolist())
                    holds += [(page, holder) for page in taken.tolist()]
            case 1 if holds:
                some = {page for page, _ in rng.sample(holds, min(len(holds), 4))}
                pages.hold(ints(sorted(some)), holder)
                holds += [(page, holder) for page in some]
            case 2:
                for _ in range(min(len(holds), 10)):  # as many as the others add
                    page, holder = holds.pop(rng.randrange(len(holds)))
                    pages.drop(ints([page]), holder)
            case 3:
                some = set(rng.sample(range(32), 3))
                pages.hold_even_free(ints(sorted(some)), holder)
                holds += [(page, holder) for page in some]
        held = {page for page, _ in holds}
        assert pages.num_free == 32 - len(held)
        for each in PageHolder:
            counted = Counter(page for page, by in holds if by is each)
            assert pages.holds(each).tolist() == [counted[page] for page in range(32)]
        pages.check()
