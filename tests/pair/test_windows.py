"""Layers with a window, and answers longer than it, from one node to another: what is behind the
window is neither sent nor kept."""

import pytest

from kvtransfer.messages import PagesReady
from tests.support.pair_node import Size
from tests.support.pair_rig import PairRig

WINDOW = 24  # of gemma3_text as these tests make it: two pages, and three at a page's edge
LONG = 300
ROOM = Size(num_pages=128)


@pytest.fixture(scope="module")
def known(model):
    return model("gemma3_text")


def prompt(length: int, seed: int = 1) -> list[int]:
    return [(seed * 31 + 7 * i + i * i) % 250 for i in range(length)]


def handed(rig: PairRig) -> int:
    return sum(len(said.pages) for said in rig.wires.seen if isinstance(said, PagesReady))


@pytest.mark.parametrize("length", [1, 16, WINDOW, 48, LONG])
def test_answers_are_those_of_transformers_and_only_live_pages_travel(known, length):
    tables = known.tables(16)
    assert tables.windows == (None, WINDOW, WINDOW, WINDOW)
    with PairRig(known.loaded, prefill=[ROOM], decode=[ROOM]) as rig:
        asked = rig.ask(prompt(length), 60)
        rig.run()
        assert asked.tokens == known.greedy(prompt(length), 60)
        assert handed(rig) == tables.pages_for(length)


def test_a_full_hit_here_still_needs_the_windows_from_there(known):
    with PairRig(known.loaded, prefill=[ROOM], decode=[ROOM]) as rig:
        first = rig.ask(prompt(LONG), 20)
        rig.run()
        rig.wires.seen.clear()
        again = rig.ask(prompt(LONG), 20)
        rig.run()
        assert again.tokens == first.tokens == known.greedy(prompt(LONG), 20)
        assert again.cached_tokens == LONG // 16 * 16
        # One page of the full table, which is not a whole one, and the windows.
        assert handed(rig) == 1 + known.tables(16).pages_for(LONG) - (LONG // 16 + 1)


def test_more_answers_than_fit_with_all_their_pages_fit_with_their_windows(known):
    """Retract some of the responses that do not fit, and continue them later."""
    tables = known.tables(16)
    bold = {"new_token_ratio": 0.01, "min_new_token_ratio": 0.01}
    for factor, retracts in ((1.0, True), (2.2, False)):
        num_pages = int(factor * tables.pages_to_compute(LONG))
        with PairRig(
            known.loaded, decode=[Size(num_pages=num_pages, num_slots=8)], scheduler=bold
        ) as rig:
            asked = [rig.ask(prompt(200, seed), 60) for seed in range(3)]
            rig.run()
            for seed, one in enumerate(asked):
                assert one.tokens == known.greedy(prompt(200, seed), 60)
            (decode,) = rig.decode
            assert (decode.count("retractions") > 0) is retracts
            assert 3 * tables.pages_to_compute(260) > num_pages


def test_a_request_goes_on_elsewhere_and_is_computed_here_when_no_owner_is_left(known):
    with PairRig(known.loaded, prefill=(), decode=[ROOM]) as rig:
        asked = rig.ask(prompt(LONG), 40)
        replayed = rig.ask(prompt(LONG), 40, generated=known.greedy(prompt(LONG), 25))
        rig.run()
        assert asked.tokens == known.greedy(prompt(LONG), 40)
        assert replayed.tokens == known.greedy(prompt(LONG), 40)[25:]
