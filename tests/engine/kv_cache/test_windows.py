"""Pages before a window are released as soon as no step can read them, and not earlier. Page
accounting is tested without a model: wrong pages give wrong tokens."""

import random
from itertools import pairwise

import numpy as np
import pytest

from engine.batch.holding import PageHolding
from engine.batch.request import Request
from engine.kv_cache.pages import PageHolder
from tests.support.engine.engine_rig import Rig, ints

WINDOWS = (None, 24, 40)
CHUNKED = {"chunked_prefill_tokens": 32}


def live_pages(rig: Rig, request: Request) -> list[int]:
    """Return the pages of a running request, by table."""
    assert request.slot is not None
    return [int((row >= 0).sum()) for row in rig.table.holding_of(request.slot).tables]


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 90), k=length)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_long_request_holds_only_its_window(overlap):
    rig = Rig(windows=WINDOWS, num_pages=100, overlap_schedule=overlap, **CHUNKED)
    request = rig.add(prompt(150), 200)
    most = [0, 0, 0]
    while request.key not in rig.finished:
        rig.step()
        if request.slot is not None and rig.table.known[request.slot] > 160:
            most = [max(pair) for pair in zip(most, live_pages(rig, request), strict=True)]
    assert most[0] >= 21
    assert most[1:] == [3, 4]  # the window, the rest of its first page, and the page being filled
    rig.complete()


def test_a_launched_step_holds_the_pages_that_it_writes_for_an_ended_request_in_every_table():
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


def test_chunks_free_the_pages_before_their_window_while_the_prompt_is_computed():
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
def test_a_repeated_prompt_continues_before_its_end(length, chunked_prefill_tokens):
    rig = Rig(windows=WINDOWS, num_pages=100, chunked_prefill_tokens=chunked_prefill_tokens)
    first = rig.add(prompt(length), 4)
    rig.run()
    again = rig.add(prompt(length), 4)
    rig.run()
    assert rig.tokens[first.key] == rig.tokens[again.key]
    assert again.cached_tokens == (length - 1) // 16 * 16
    rig.complete()


def test_a_conversation_continues_from_the_end_of_its_last_response():
    rig = Rig(windows=WINDOWS, num_pages=100, **CHUNKED)
    first = rig.add(prompt(100), 60)
    rig.run()
    told = [*prompt(100), *rig.tokens[first.key]]
    second = rig.add([*told, *prompt(30, seed=1)], 4)
    rig.run()
    assert second.cached_tokens == (len(told) - 1) // 16 * 16
    rig.complete()


def test_a_prefix_without_its_windows_is_recomputed_and_still_useful_to_a_consumer():
    """No windows are kept after a branch in the middle of a chunk."""
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


def test_matched_pages_are_held_before_any_allocation(monkeypatch):
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


def test_a_request_that_joins_with_only_its_windows_continues():
    rig = Rig(windows=WINDOWS, num_pages=100)
    rig.add(prompt(130), 30)
    rig.run()
    request = rig.request(prompt(130), 50, generated=[5])
    assert rig.land(request)
    held = [int((row >= 0).sum()) for row in rig.landed[0][1].tables]
    assert held == [9, 3, 4]
    rig.join_landed()
    rig.complete()


def test_retracted_requests_return_with_their_windows():
    hopeful = {"chunked_prefill_tokens": 32, "new_token_ratio": 0.01, "min_new_token_ratio": 0.01}
    rig = Rig(windows=WINDOWS, num_pages=40, swap_pages=200, **hopeful)
    for seed in range(4):
        rig.add(prompt(90, seed), 150, ignore_eos=True)
    rig.run()
    assert rig.scheduler.counters()["retractions"] > 0
    rig.complete()


def test_requests_with_one_prefix_release_the_same_pages_in_one_step():
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
    """Common prefixes, joins, cancels and too few pages for all, over both loops."""
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


def test_pages_of_an_unused_window_are_evicted_before_a_used_prefix():
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


def test_every_page_held_only_by_the_tree_is_available():
    """This includes pages of a window before a prefix in use."""
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
