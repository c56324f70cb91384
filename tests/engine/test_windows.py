"""Pages behind a window are given away as soon as no step can read them, and no sooner; whatever
else happens to their request. The books without a model: wrong pages give wrong tokens."""

import random
from itertools import pairwise

import numpy as np
import pytest

from engine.batch.holding import PageHolding
from engine.batch.request import Request
from engine.kv_cache.pages import PageHolder
from tests.support.engine_rig import Rig, ints

WINDOWS = (None, 24, 40)
CHUNKED = {"chunked_prefill_tokens": 32}


def live_pages(rig: Rig, request: Request) -> list[int]:
    """By table, of one that runs."""
    assert request.slot is not None
    return [int((row >= 0).sum()) for row in rig.table.holding_of(request.slot).tables]


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 90), k=length)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_long_request_holds_its_window_and_no_more(overlap):
    rig = Rig(windows=WINDOWS, num_pages=100, overlap_schedule=overlap, **CHUNKED)
    request = rig.add(prompt(150), 200)
    most = [0, 0, 0]
    while request.key not in rig.finished:
        rig.step()
        if request.slot is not None and rig.table.known[request.slot] > 160:
            most = [max(pair) for pair in zip(most, live_pages(rig, request), strict=True)]
    assert most[0] >= 21
    assert most[1:] == [3, 4]  # the window, what the page's edge adds, and the page being filled
    rig.complete()


def test_a_launched_step_holds_what_it_writes_for_an_ended_request_in_every_table():
    rig = Rig(windows=WINDOWS, num_pages=100, prefix_cache=False, **CHUNKED)
    fifth = rig.expected(rig.request(prompt(100), 200))[0][4]
    request = rig.add(prompt(100), 200, stop=(fifth,))
    while request.key not in rig.finished:
        if request.slot is not None:
            tables = rig.table.holding_of(request.slot).tables
        rig.step()
    assert rig.in_flight is not None
    (written,) = rig.in_flight.batch.starts // 16
    held = np.flatnonzero(rig.pages.holds(PageHolder.STEP))
    assert held.tolist() == sorted(tables[:, written].tolist())
    rig.run()


def test_chunks_free_what_is_behind_them_while_the_prompt_is_computed():
    rig = Rig(windows=WINDOWS, num_pages=100, **CHUNKED, prefix_cache=False)
    request = rig.add(prompt(400), 2)
    rig.step(2)
    held = [live_pages(rig, request)]
    while not rig.tokens[request.key]:
        rig.step()
        if request.slot is not None:
            held.append(live_pages(rig, request))
    assert held[0] == [25, 25, 25]
    windows = [pages[1:] for pages in held]
    assert max(windows[-1]) <= 4
    assert all(now <= then for then, now in pairwise(windows))
    rig.complete()


@pytest.mark.parametrize("chunked_prefill_tokens", [32, -1])
@pytest.mark.parametrize("length", [96, 97, 111, 112])
def test_the_same_prompt_once_more_goes_on_before_its_end(length, chunked_prefill_tokens):
    rig = Rig(windows=WINDOWS, num_pages=100, chunked_prefill_tokens=chunked_prefill_tokens)
    first = rig.add(prompt(length), 4)
    rig.run()
    again = rig.add(prompt(length), 4)
    rig.run()
    assert rig.tokens[first.key] == rig.tokens[again.key]
    assert again.cached_tokens == (length - 1) // 16 * 16
    rig.complete()


def test_a_conversation_goes_on_from_where_its_last_answer_ended():
    rig = Rig(windows=WINDOWS, num_pages=100, **CHUNKED)
    first = rig.add(prompt(100), 60)
    rig.run()
    told = [*prompt(100), *rig.tokens[first.key]]
    second = rig.add([*told, *prompt(30, seed=1)], 4)
    rig.run()
    assert second.cached_tokens == (len(told) - 1) // 16 * 16
    rig.complete()


def test_a_prefix_without_its_windows_is_computed_anew_and_is_of_use_to_a_consumer():
    """After a branch in the middle of a chunk no windows are kept."""
    rig = Rig(windows=WINDOWS, num_pages=100)
    rig.add(prompt(200), 4)
    rig.run()
    branch = [*prompt(200)[:100], *prompt(50, seed=1)]
    match = rig.cache.match(ints(branch))
    assert match.num_tokens == 0 and match.shared.shape == (1, 6)
    request = rig.add(branch, 4)
    rig.run()
    assert request.cached_tokens == 0
    rig.complete()


def test_what_was_matched_is_held_before_anything_is_allocated(monkeypatch):
    """An allocation may evict."""
    rig = Rig(windows=WINDOWS, num_pages=100, **CHUNKED)
    rig.add(prompt(100), 4)
    rig.run()
    matched: list[list[int]] = []
    match, allocate = rig.cache.match, rig.cache.allocate

    def remember(*args):
        found = match(*args)
        matched.append(found.pages.tolist())
        return found

    def check(num_pages, holder):
        if matched:
            assert rig.pages.holds(PageHolder.REQUEST)[matched.pop()].all()
        return allocate(num_pages, holder)

    monkeypatch.setattr(rig.cache, "match", remember)
    monkeypatch.setattr(rig.cache, "allocate", check)
    rig.add(prompt(110), 4)
    rig.step()
    assert not matched
    rig.run()


def test_who_joins_with_its_windows_alone_goes_on():
    rig = Rig(windows=WINDOWS, num_pages=100)
    rig.add(prompt(130), 30)
    rig.run()
    request = rig.request(prompt(130), 50, generated=[5])
    assert rig.land(request)
    held = [int((row >= 0).sum()) for row in rig.landed[0][1].tables]
    assert held == [9, 3, 4]
    rig.join_landed()
    rig.complete()


def test_retracted_requests_come_back_with_their_windows():
    hopeful = {"chunked_prefill_tokens": 32, "new_token_ratio": 0.01, "min_new_token_ratio": 0.01}
    rig = Rig(windows=WINDOWS, num_pages=40, swap_pages=200, **hopeful)
    for seed in range(4):
        rig.add(prompt(90, seed), 150, ignore_eos=True)
    rig.run()
    assert rig.scheduler.counters()["retractions"] > 0
    rig.complete()


def test_requests_of_one_prefix_let_go_of_the_same_pages_in_one_step():
    rig = Rig(windows=WINDOWS, num_pages=200, chunked_prefill_tokens=-1)
    rig.add(prompt(97), 1)
    rig.run()
    for _ in range(3):
        rig.add([*prompt(97)[:96], 7], 40, ignore_eos=True)
    rig.complete()


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 9))]
)
def test_random_traffic_over_windows(seed):
    """Prefixes in common, joins, cancels and too few pages for all, over both loops."""
    rng = random.Random(seed)
    rig = Rig(
        windows=rng.choice([WINDOWS, (None, 1), (None, 17), (None, None, 100), (None, 5, 33, 64)]),
        num_pages=rng.choice([60, 90, 200]),
        swap_pages=rng.choice([0, 20, 400]),
        overlap_schedule=rng.random() < 0.7,
        overlap_prefills=rng.random() < 0.5,
        prefix_cache=rng.random() < 0.8,
        chunked_prefill_tokens=rng.choice([-1, 16, 48]),
    )
    stems = [prompt(rng.randrange(1, 120), seed) for seed in range(3)]
    live: list[Request] = []
    for _ in range(150):
        stem = rng.choice(stems)
        tokens = [*stem[: rng.randrange(1, len(stem) + 1)], *prompt(rng.randrange(30), seed)]
        match rng.randrange(8):
            case 0 | 1:
                if len(tokens) < rig.table.tables.max_tokens(rig.num_pages):
                    live.append(rig.add(tokens, rng.randrange(1, 120)))
            case 2:
                request = rig.request(tokens, rng.randrange(2, 60), generated=[5])
                if rig.scheduler.finish_of(request, 5) is None and rig.land(request):
                    rig.join_landed()
                    live.append(request)
            case 3 if live and rng.random() < 0.3:
                rig.abort(live.pop(rng.randrange(len(live))))
        rig.step(rng.randrange(4))
    rig.complete()
    assert sum(not finish.error for finish in rig.finished.values()) > 10


def test_pages_of_a_window_are_evicted_before_a_prefix_that_is_gone_on_from():
    rig = Rig(windows=(None, 24), num_pages=200, **CHUNKED)
    rig.add(prompt(320), 2)
    rig.run()
    held = rig.cache.num_pages
    assert rig.cache.evict(4) == 4
    assert rig.cache.num_pages == held - 4
    again = rig.add(prompt(320), 2)
    rig.run()
    assert again.cached_tokens == 304
    rig.assert_at_rest()


def test_every_page_that_only_the_tree_holds_can_be_had():
    """Also of a window above a prefix that is in use."""
    rig = Rig(windows=WINDOWS, num_pages=60, vandal=False, **CHUNKED)
    rig.add(prompt(160), 2)
    rig.run()
    match = rig.cache.match(ints(prompt(160)))
    held = match.shared[:, 2:4].ravel()
    rig.pages.hold(held, PageHolder.READ)
    available = rig.cache.num_available
    taken = rig.cache.allocate(available, PageHolder.REQUEST)
    assert taken is not None and len(taken) == available == 60 - 2
    rig.pages.drop(taken, PageHolder.REQUEST)
    rig.pages.drop(held, PageHolder.READ)
    rig.cache.check()
    rig.pages.check()


def test_tables_of_a_holding_keep_their_shape_when_their_pages_move():
    holding = PageHolding.of(ints([4, 5, 6]), ints([-1, 8, 9]))
    assert holding.flat().tolist() == [4, 5, 6, 8, 9]
    moved = holding.moved_to(ints([1, 2, 3, 4, 5]))
    assert np.array_equal(moved.tables, [[1, 2, 3], [-1, 4, 5]])
