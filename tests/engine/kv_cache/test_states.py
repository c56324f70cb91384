"""States beside pages: from which state a request continues, which are kept, and which are
evicted first."""

import random

import numpy as np
import pytest

from engine.batch.holding import PageHolding
from engine.batch.request import FinishReason
from engine.kv_cache.pages import PageAllocator, PageHolder
from engine.kv_cache.radix import PrefixCache
from engine.kv_cache.radix_nodes import stretch
from tests.engine.sampling.test_speculation import guesses
from tests.engine.scheduler.test_scheduler_random import Traffic
from tests.support.engine.engine_rig import Rig, ints
from tests.support.engine.fake_backend import VOCABULARY
from tests.support.engine.lifo_pages import LifoFreeList
from tests.support.models.drafters import KINDS

STATE = 3


def prompt(length: int, seed: int = 1) -> list[int]:
    return [(seed * 31 + 7 * i + i * i) % VOCABULARY for i in range(length)]


def rig(**options: object) -> Rig:
    options = {"state_pages": STATE, "num_pages": 96, **options}
    return Rig(**options)  # type: ignore[arg-type]


def served(rig: Rig, tokens: list[int], max_tokens: int = 4) -> int:
    """Run one request to its end. Return how many of its tokens were cached."""
    request = rig.add(tokens, max_tokens)
    rig.complete(request)
    return request.cached_tokens


@pytest.mark.parametrize("chunk", [-1, 32])
def test_the_same_prompt_continues_from_the_last_possible_page(chunk):
    for length in (5, 16, 17, 100, 112):
        one = rig(chunked_prefill_tokens=chunk)
        assert served(one, prompt(length)) == 0
        assert served(one, prompt(length)) == (length - 1) // 16 * 16
        assert served(one, prompt(length) + prompt(30, 2)) == (length - 1) // 16 * 16
        one.assert_at_rest()


def test_the_third_prompt_with_a_common_prefix_continues_from_its_end():
    one = rig()
    stem = prompt(70)
    assert served(one, stem + prompt(50, 2)) == 0
    assert served(one, stem + prompt(50, 3)) == 0
    assert served(one, stem + prompt(50, 4)) == 64
    assert served(one, stem + prompt(50, 3)) == 112
    one.assert_at_rest()


def test_without_a_prefix_cache_no_state_is_kept():
    one = rig(prefix_cache=False)
    assert served(one, prompt(100)) == served(one, prompt(100)) == 0
    assert one.pages.num_free == one.num_pages


@pytest.mark.parametrize("chunk, length", [(-1, 100), (32, 100), (32, 59)])
def test_no_state_is_kept_of_a_row_that_is_not_finite(chunk, length):
    """Nor of the next one, which is launched before this is known."""
    poison = VOCABULARY  # no token of a prompt
    one = rig(poison=poison, chunked_prefill_tokens=chunk)
    request = one.add([poison, *prompt(length)], 4)
    one.run()
    assert one.finished[request.key].reason is FinishReason.ERROR
    assert one.cache.num_pages == 0
    one.assert_at_rest()


def test_a_launched_step_holds_the_state_that_it_writes_for_an_ended_request():
    one = rig(chunked_prefill_tokens=32)
    fifth = one.expected(one.request(prompt(100), 20))[0][4]
    request = one.add(prompt(100), 20, stop=(fifth,))
    while request.key not in one.finished:
        if request.slot is not None:
            state = one.table.state[request.slot].copy()
        one.step()
    assert one.in_flight is not None
    assert (one.pages.holds(PageHolder.STEP)[state] == 1).all()
    one.run()


def test_a_request_that_waits_for_a_state_of_another_continues_from_it():
    one = rig(chunked_prefill_tokens=32)
    first, second = one.add(prompt(300), 2), one.add(prompt(310), 2)
    other = one.add([*prompt(200), *prompt(100, 5)], 2)
    one.complete()
    # no request leaves a state where they diverge
    assert first.cached_tokens == other.cached_tokens == 0
    assert second.cached_tokens == 288


def test_without_room_for_states_prompts_are_served_nevertheless():
    one = rig(num_pages=2 * STATE + 8)
    for seed in range(4):
        served(one, prompt(70, seed), 40)
    one.assert_at_rest()


@pytest.mark.parametrize(
    "given, expected",
    [
        ((0, 100, 100, 0), (100, 96)),
        ((0, 96, 96, 0), (96, 80)),
        ((0, 64, 100, 0), (64, 0)),
        ((64, 100, 100, 0), (100, 96)),
        ((96, 100, 100, 0), (100, 0)),
        ((0, 10, 10, 0), (10, 0)),
        ((0, 100, 100, 48), (48, 48)),
        ((48, 100, 100, 48), (100, 96)),
        ((0, 48, 100, 48), (48, 48)),
        ((0, 100, 100, 96), (100, 96)),
    ],
)
def test_states_are_kept_at_these_positions(given, expected):
    start, end, num_tokens, branch = given
    assert stretch(start, end, num_tokens=num_tokens, branch=branch, page_size=16) == expected


class Books:
    """A tree, and a list of all inserted (tokens, state)."""

    SIZE = 4

    def __init__(self, num_pages: int = 400) -> None:
        self.pages = PageAllocator(num_pages, LifoFreeList)
        self.cache = PrefixCache(self.SIZE, self.pages, (None,), STATE)
        self.taught: list[tuple[list[int], list[int]]] = []

    def teach(self, tokens: list[int], keep: int) -> None:
        """Insert pages and a state into the cache, as the results of a step do."""
        num_pages = len(tokens) // self.SIZE
        fresh = self.cache.allocate(num_pages + STATE, PageHolder.REQUEST)
        if fresh is None:
            return
        holding, state = PageHolding.of(fresh[:num_pages]), fresh[num_pages:]
        self.cache.insert(ints(tokens), holding)
        self.cache.insert(ints(tokens[:keep]), holding, state=state)
        self.taught.append((tokens[:keep], state.tolist()))
        self.pages.drop(fresh, PageHolder.REQUEST)

    def check(self) -> None:
        self.pages.check()
        self.cache.check()


def test_a_match_ends_at_a_state_and_has_the_inserted_pages():
    rng = random.Random(4)
    books = Books()
    for _ in range(60):
        tokens = [rng.randrange(2) for _ in range(4 * rng.randint(1, 6))]
        books.teach(tokens, 4 * rng.randint(1, len(tokens) // 4))
        books.check()
        asked = [rng.randrange(2) for _ in range(rng.randint(0, 30))]
        match = books.cache.match(ints(asked))
        known = [len(t) for t, _ in books.taught if asked[: len(t)] == t]
        assert match.num_tokens == max(known, default=0)
        found = [s for t, s in books.taught if asked[: match.num_tokens] == t]
        assert match.state.tolist() == (found[0] if match.num_tokens else [])
        assert match.shared.shape[1] * 4 >= match.num_tokens
        assert match.holding.num_pages * 4 == match.num_tokens


def test_states_superseded_by_a_deeper_one_are_evicted_first_unless_used():
    books = Books(num_pages=24)
    tokens = list(range(32))
    for keep in (8, 16, 28):
        books.teach(tokens[: keep + 4], keep)
    assert books.cache.match(ints(tokens[:12])).num_tokens == 8
    taken = books.cache.allocate(books.pages.num_free + 1, PageHolder.REQUEST)
    assert taken is not None
    books.check()
    assert books.cache.match(ints([*tokens[:20], 99])).num_tokens == 8
    assert books.cache.match(ints(tokens)).num_tokens == 28


def test_all_pages_held_only_by_the_tree_are_available_while_others_are_read():
    for seed in range(20):
        rng = random.Random(seed)
        books = Books(num_pages=60)
        for _ in range(15):
            tokens = [rng.randrange(2) for _ in range(4 * rng.randint(1, 6))]
            books.teach(tokens, 4 * rng.randint(1, len(tokens) // 4))
        held = []
        for _ in range(rng.randint(0, 3)):
            match = books.cache.match(ints([rng.randrange(2) for _ in range(24)]))
            books.pages.hold(match.holding.flat(), PageHolder.REQUEST)
            books.pages.hold(match.state, PageHolder.STEP)
            held.append(match)
        num_available = books.cache.num_available
        rest = books.cache.allocate(num_available, PageHolder.REQUEST)
        assert rest is not None and len(rest) == num_available
        for match in held:
            assert not np.isin(match.pages, rest).any()
        books.check()
        assert books.cache.flush() == 0 or held
        books.check()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_random_workloads_continue_from_the_right_states(seed):
    rng = random.Random(seed)
    pressure = seed % 2 == 0
    one = rig(
        num_pages=rng.choice((12, 18, 30) if pressure else (40, 120)),
        max_running_requests=rng.choice((3, 8)),
        context_length=rng.choice((128, 512)),
        swap_pages=rng.choice((0, 8, 64)),
        overlap_schedule=rng.random() < 0.7,
        overlap_prefills=rng.random() < 0.5,
        prefix_cache=rng.random() < 0.9,
        windows=rng.choice(((None,), (None,), (None, 40))),
        speculator=guesses(rng.choice(KINDS), seed) if rng.random() < 0.5 else None,
        policy=rng.choice(("fcfs", "lpm")),
        chunked_prefill_tokens=rng.choice((-1, 16, 64, 100)),
        mixed_chunk=rng.random() < 0.4,
        new_token_ratio=0.1 if pressure else 0.5,
        min_new_token_ratio=0.01,
    )
    traffic = Traffic(
        one,
        rng,
        left=rng.randint(5, 15),
        pressure=pressure,
        aborts=rng.random() < 0.4,
        joins=rng.random() < 0.5,
        num_namespaces=1 + seed % 2,
    )
    one.before_poll.append(traffic.poll)
    one.run_until(lambda: traffic.over and one.in_flight is None, max_steps=20000)
    one.complete()
