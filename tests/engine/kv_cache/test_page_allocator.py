"""Pages with holders of several kinds: each page is free or held, and is counted once."""

import random
from collections import Counter

import numpy as np
import pytest

from common.errors import EngineFault
from engine.kv_cache.pages import AscendingRuns, PageAllocator, PageHolder
from tests.support.engine.engine_rig import ints
from tests.support.engine.lifo_pages import LifoFreeList


def _allocate(pages: PageAllocator, num_pages: int, holder: PageHolder = PageHolder.REQUEST):
    taken = pages.allocate(num_pages, holder)
    assert taken is not None
    return taken


def test_free_pages_are_allocated_in_ascending_runs():
    pages = PageAllocator(8)
    first, second = _allocate(pages, 3), _allocate(pages, 3)
    pages.drop(first, PageHolder.REQUEST)
    pages.drop(second, PageHolder.REQUEST)
    assert _allocate(pages, 8).tolist() == list(range(8))


def test_a_free_page_cannot_be_held():
    pages = PageAllocator(2)
    with pytest.raises(EngineFault, match="free"):
        pages.hold(ints([1]), PageHolder.STEP)


def test_a_hold_that_does_not_exist_cannot_be_dropped():
    pages = PageAllocator(2)
    page = _allocate(pages, 1)
    with pytest.raises(EngineFault, match="READ"):
        pages.drop(page, PageHolder.READ)


def test_the_release_count_changes_when_a_page_becomes_available():
    pages = PageAllocator(4)
    taken = _allocate(pages, 2)
    pages.hold(taken, PageHolder.STEP)
    before = pages.num_released
    pages.drop(taken, PageHolder.STEP)
    assert pages.num_released == before
    pages.drop(taken, PageHolder.REQUEST)
    assert pages.num_released == before + 2


def test_gauges_count_every_page_once_by_its_first_kind_of_hold():
    pages = PageAllocator(7)
    taken = _allocate(pages, 5)
    pages.hold(taken[:4], PageHolder.CACHE)
    pages.hold(taken[:1], PageHolder.STEP)
    pages.hold(taken[1:2], PageHolder.PUBLICATION)
    pages.drop(taken[1:3], PageHolder.REQUEST)
    held = {"free": 2, "request": 3, "step": 0, "read": 0, "publication": 1, "copy": 0, "cache": 1}
    assert pages.by_holder() == held
    assert pages.num_evictable == held["cache"]


@pytest.mark.parametrize("free_list", [AscendingRuns, LifoFreeList])
def test_the_accounting_agrees_with_plain_counts_over_random_holds(free_list):
    rng = random.Random(7)
    pages = PageAllocator(32, free_list)
    holds: list[tuple[int, PageHolder]] = []
    for _ in range(3000):
        holder = rng.choice(list(PageHolder))
        match rng.randrange(4):
            case 0:
                wanted = rng.randrange(5)
                taken = pages.allocate(wanted, holder)
                assert (taken is None) == (wanted > 32 - len({page for page, _ in holds}))
                if taken is not None:
                    assert len(taken) == wanted
                    assert not {page for page, _ in holds} & set(taken.tolist())
                    holds += [(page, holder) for page in taken.tolist()]
            case 1 if holds:
                some = {page for page, _ in rng.sample(holds, min(len(holds), 4))}
                pages.hold(ints(sorted(some)), holder)
                holds += [(page, holder) for page in some]
            case 2:
                for _ in range(min(len(holds), 10)):  # as many as the other holds add
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
            only = held - {page for page, by in holds if by is not each}
            assert set(np.flatnonzero(pages.held_only_by(np.arange(32), each))) == only
        assert pages.num_evictable == len(only)  # of the last kind, CACHE
        pages.check()
